"""`paceline job`: who waits for slots, why, and in which order; and what changes the order."""

from typing import Annotated, Literal

import typer

from paceline.cli._command_options import ExperimentId, Json, Limit
from paceline.cli._errors import CommandError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and change the order in which experiments get slots.",
)


@app.command("list")
def list_jobs(
    pool: Annotated[
        str | None, typer.Option("--pool", metavar="NAME", help="Show only this pool.")
    ] = None,
    limit: Limit = 100,
    json: Json = False,
) -> None:
    """List the trials that wait for slots, the next one first, and why each waits."""
    from paceline.cli._connection import connect
    from paceline.cli._console_output import format_age, print_json, print_table

    with connect() as client:
        queue = client.queue(pool=pool, limit=limit)
    if json:
        print_json(queue)
        return
    print_table(
        ["Pool", "Ahead", "Trial", "Experiment", "Slots", "Rank", "Waits since", "Why"],
        [
            (
                entry.pool,
                entry.num_ahead,
                entry.trial_id,
                f"{entry.experiment_id} {entry.experiment_name}",
                entry.num_slots,
                _rank(entry.priority, entry.weight),
                format_age(entry.waiting_since),
                entry.detail,
            )
            for entry in queue
        ],
        right=["Ahead", "Trial", "Slots"],
        shortened=["Experiment"],
        wrapped="Why",
        empty="Nothing waits for slots.",
    )


@app.command("move")
def move(
    experiment: ExperimentId,
    ahead_of: Annotated[
        int | None,
        typer.Option("--ahead-of", metavar="ID", help="Put it right ahead of this experiment."),
    ] = None,
    behind: Annotated[
        int | None,
        typer.Option("--behind", metavar="ID", help="Put it right behind this experiment."),
    ] = None,
    front: Annotated[bool, typer.Option("--front", help="Put it to the front.")] = False,
    end: Annotated[bool, typer.Option("--end", help="Put it to the end.")] = False,
) -> None:
    """Give an experiment another turn among those of its pool that are as important."""
    from paceline.cli._connection import connect

    num_given = [ahead_of is not None, behind is not None, front, end].count(True)
    if num_given != 1:
        raise CommandError(
            "One of `--ahead-of ID`, `--behind ID`, `--front` and `--end` must be given, but got"
            f" {num_given}."
        )
    to: Literal["front", "end"] | None = "front" if front else "end" if end else None
    with connect() as client:
        client.move_in_queue(experiment, ahead_of=ahead_of, behind=behind, to=to)
    typer.echo(f"Experiment {experiment} is moved. `paceline job list` shows the order.")


def set_priority(
    experiment: ExperimentId,
    priority: Annotated[
        int,
        typer.Argument(
            min=1, max=99, metavar="PRIORITY", help="1 is the most important one, 99 the least."
        ),
    ],
) -> None:
    """Set an experiment's priority in pools with the policy `priority`."""
    from paceline.cli._connection import connect

    with connect() as client:
        client.get_experiment(experiment).set_priority(priority)
    typer.echo(f"Experiment {experiment} has priority {priority}.")


def set_weight(
    experiment: ExperimentId,
    weight: Annotated[
        float, typer.Argument(metavar="WEIGHT", help="A number above 0; the default is 1.")
    ],
) -> None:
    """Set an experiment's weight in pools with the policy `fair_share`."""
    from paceline.cli._connection import connect

    with connect() as client:
        client.get_experiment(experiment).set_weight(weight)
    typer.echo(f"Experiment {experiment} has weight {weight:g}.")


def set_max_slots(
    experiment: ExperimentId,
    max_slots: Annotated[
        str, typer.Argument(metavar="NUMBER", help="Number of slots, or none for no limit.")
    ],
) -> None:
    """Set how many slots the trials of an experiment may use at once. Running trials go on."""
    from paceline.cli._connection import connect

    if max_slots != "none" and not (max_slots.isdecimal() and int(max_slots) > 0):
        raise CommandError(f"`NUMBER` must be a number above 0, or none, but got {max_slots!r}.")
    with connect() as client:
        number = None if max_slots == "none" else int(max_slots)
        client.get_experiment(experiment).set_max_slots(number)
    told = "as many slots as there are" if number is None else f"{number} slot{'s' * (number > 1)}"
    typer.echo(f"Experiment {experiment} may use {told} at a time.")


def _rank(priority: int | None, weight: float | None) -> str:
    if priority is not None:
        return f"priority {priority}"
    return "" if weight is None else f"weight {weight:g}"
