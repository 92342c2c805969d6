"""Commands `paceline experiment propose`, `tree`, `diff` and `repeat`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._console_output import (
    console,
    format_values,
    print_agent_hint,
    print_answer,
    print_json,
    print_list,
    state_text,
)
from paceline.cli._experiment_commands import experiment_app
from paceline.cli._options_and_errors import (
    CommandError,
    ExperimentId,
    Json,
    RequestKey,
    connect,
    nested_overrides,
)

if TYPE_CHECKING:
    from paceline._cluster.messages.experiment_models import Relative


@experiment_app.command()
def propose(
    experiment: ExperimentId,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hyperparameters, such as lr=0.01; the rest are drawn. None to show proposals.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    why: Annotated[str, typer.Option(metavar="TEXT", help="The reason, for people.")] = "",
    by: Annotated[
        str, typer.Option(metavar="NAME", help="Who proposes. The default is the user.")
    ] = "",
    key: RequestKey = None,
) -> None:
    """Propose hyperparameters for the next trial of a search, or show the proposals."""
    with connect() as client:
        found = client.get_experiment(experiment)
        if values:
            made = found.propose(nested_overrides(values), why=why, by=by, key=key)
        proposals = [made] if values else found.proposals()
    if not values:
        rows = [
            (one.number, format_values(one.hparams), one.trial_id or one.problem, one.by, one.why)
            for one in proposals
        ]
        titles = ["Number", "Hyperparameters", "Trial", "By", "Why"]
        print_list(proposals, titles, rows, right=["Number"], empty="No proposals.")
        return
    where = "waits for the next trial" if made.trial_id is None else f"is trial {made.trial_id}"
    print_answer([made], f"Proposal {made.number} for experiment {experiment} {where}.")
    print_agent_hint(f"`paceline e propose {experiment}` shows which trial took it.")


@experiment_app.command("tree", is_list=True)
def show_tree(experiment: ExperimentId) -> None:
    """Show what an experiment came from, and all that came of that."""
    with connect() as client:
        found = client.get_experiment(experiment).tree()
    depths: dict[int | None, int] = {None: -1}
    rows = []
    for one in found:
        depths[one.id] = depths[one.parent] + 1
        rows.append(_tree_row(one, depths[one.id]))
    print_list(found, ["Experiment", "Name", "State", "Best metric", "Code"], rows)


def _tree_row(one: "Relative", depth: int) -> tuple[Any, ...]:
    code = "changed" if one.has_changed_code else None
    return "  " * depth + str(one.id), one.name, state_text(one.state), one.best_metric, code


@experiment_app.command()
def diff(
    experiment: ExperimentId,
    since: Annotated[
        int | None,
        typer.Option(metavar="ID", help="Compare with this experiment, not with its parent."),
    ] = None,
    json: Json = False,
) -> None:
    """Show how the code of an experiment differs from that of the one it came from."""
    with connect() as client:
        found = client.get_experiment(experiment).diff(since)
    if json:
        print_json(found)
        return
    if not found.files:
        console().print(f"The code is that of experiment {found.since}.")
    for file in found.files:
        text = file.diff or f"{file.change} {file.path}: not shown, as it is large or no text"
        console().print(text, soft_wrap=True)


@experiment_app.command()
def repeat(
    experiment: ExperimentId,
    seeds: Annotated[int, typer.Option(min=2, metavar="N", help="Number of repeats.")] = 5,
    trial: Annotated[
        int | None, typer.Option(metavar="TRIAL", help="Trial. The default is the best one.")
    ] = None,
    baseline: Annotated[
        int | None, typer.Option(metavar="TRIAL", help="Trial to compare with, with equal seeds.")
    ] = None,
    paused: Annotated[
        bool, typer.Option("--paused", help="Create them, but do not start them.")
    ] = False,
    key: RequestKey = None,
) -> None:
    """Repeat the best trial of an experiment with other seeds: is the gain real?

    `paceline e describe` of the experiment then has the answer.
    """
    with connect() as client:
        found = client.get_experiment(experiment)
        try:
            made = found.repeat(seeds, trial=trial, baseline=baseline, activate=not paused, key=key)
        except ValueError as error:
            raise CommandError(str(error)) from error
    names = " and ".join(str(one.id) for one in made)
    plural = "s" * (len(made) > 1)
    print_answer(
        [one.data for one in made],
        f"Created experiment{plural} {names} with {seeds} repeats{' each' * (len(made) > 1)}.",
    )
    waits = " && ".join(f"paceline e wait {one.id}" for one in made)
    print_agent_hint(f"`{waits} && paceline e describe {experiment} --json` has the answer.")
