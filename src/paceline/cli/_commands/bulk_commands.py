"""Commands to change an experiment, or all of a query after a preview."""

from collections.abc import Callable
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._completions import complete_experiment
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError

if TYPE_CHECKING:
    from paceline._cluster.messages.experiment_models import (
        BulkPreview,
        BulkRefusal,
        BulkWord,
        CheckpointPreview,
    )
    from paceline._cluster.messages.experiment_models import Experiment as ExperimentData
    from paceline.client._client import Client
    from paceline.client._experiment_and_trial import Experiment

_NAMED = 5

SomeExperiment = Annotated[
    int | None,
    typer.Argument(
        help="Number of the experiment; none with --query.",
        metavar="ID",
        autocompletion=complete_experiment,
    ),
]
ChangedQuery = Annotated[
    str | None,
    typer.Option(
        "--query",
        "--where",
        metavar="QUERY",
        help='Change all experiments with a trial that a query describes, such as "tag:baseline'
        ' and ended > -7d". A cut leaves each as a whole; the same command goes on.',
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Archived = Annotated[
    bool, typer.Option("--archived", help="With --query: look in the archive instead.")
]
Change = Callable[["Experiment"], "Experiment"]


class Many(NamedTuple):
    """Experiments to change: a number or a query, and how to ask."""

    experiment: int | None
    query: str | None
    yes: bool = False
    dry_run: bool = False
    archived: Literal["no", "only"] = "no"

    def checked(self) -> int | None:
        """Return the number, None with a query.

        Raises:
            CommandError: Not one of both is given.
        """
        if (self.experiment is None) == (self.query is None):
            given = "neither" if self.query is None else "both"
            raise CommandError(f"Either `ID` or `--query` must be given, but got {given}.")
        return self.experiment


def change_experiments(
    action: "BulkWord",
    many: Many,
    change: Change,
    told: "Callable[[ExperimentData], str]",
    **arguments: Any,
) -> None:
    """Change an experiment at once, or preview, ask and change those of a query.

    Args:
        action: The action.
        many: The experiments.
        change: Changes one, and returns it as it is then.
        told: Returns the sentence about a changed one.
        arguments: Those of `Client.preview_action`.
    """
    number = many.checked()
    with connect() as client:
        if number is not None and not many.dry_run:
            data = change(client.get_experiment(number)).data
            console.print_answer(data, told(data))
            return
        query, archived = many.query or f"experiment = {number}", many.archived
        preview = client.preview_action(
            action, query, archived="all" if number is not None else archived, **arguments
        )
        change_previewed(client, action, preview, many, arguments)


def change_previewed(
    client: "Client",
    action: "BulkWord",
    preview: "BulkPreview",
    many: Many,
    arguments: dict[str, Any],
) -> None:
    """Show a preview, ask, and act in pieces; the exit code is 1 if some could not be changed."""
    ids = preview.experiment_ids
    console.print_note("\n".join(_preview_lines(action, preview)))
    answer: dict[str, Any] = {"action": action, **preview.model_dump(), "is_dry_run": many.dry_run}
    errors: list[dict[str, Any]] = []
    if ids and not many.dry_run:
        options.confirm(f"{action.capitalize()} {_number_text(len(ids))}?", is_confirmed=many.yes)
        num_done = 0
        try:
            for result in client.act_on(action, ids, **arguments):
                num_done += 1
                if result.error is not None:
                    errors.append(result.model_dump())
        except BaseException:
            console.print_note(f"{num_done} of {len(ids)} are done. The same command goes on.")
            raise
    text = "\n".join(f"Experiment {one['experiment_id']}: {one['error']}" for one in errors)
    num_changed = 0 if many.dry_run else len(ids) - len(errors)
    done = f"{action}: {_number_text(num_changed)} changed."
    told = "Dry run: nothing was changed." if many.dry_run else done
    console.print_answer({**answer, "failed": errors}, "\n".join(filter(None, [text, told])))
    if errors:
        raise typer.Exit(1)


def _preview_lines(action: str, preview: "BulkPreview") -> list[str]:
    number = len(preview.experiment_ids)
    freed = f", {console.num_trials_text(preview.num_trials)}"
    if action == "delete":
        num = preview.num_checkpoints
        size = console.format_bytes(preview.checkpoint_bytes)
        files = (
            f" and {console.format_bytes(preview.file_bytes)} of files"
            if preview.file_bytes
            else ""
        )
        freed += f" and {num} checkpoint{'s' * (num != 1)} ({size}{files} freed)"
    lines = [f"{action}: {_number_text(number)}{freed}."]
    if number:
        shown = zip(preview.names, preview.experiment_ids[:_NAMED], strict=False)
        named = ", ".join(f"{name} ({number})" for name, number in shown)
        more = number - _NAMED
        lines.append(f"  {named}{f' and {more} more' if more > 0 else ''}")
    if preview.num_unchanged:
        lines.append(f"  Unchanged: {preview.num_unchanged}, as nothing is left to do.")
    return lines + refusal_lines(preview.refused)


def refusal_lines(refused: "list[BulkRefusal]") -> list[str]:
    """Return a line for each reason why some stay."""
    lines = []
    for one in refused:
        ids = ", ".join(map(str, one.experiment_ids[:_NAMED]))
        lines.append(f"  Left out: {one.number}, as {one.reason} (experiment {ids}).")
    return lines


def _number_text(number: int) -> str:
    return f"{number} experiment{'s' * (number != 1)}"


def delete(
    experiment: SomeExperiment = None,
    query: ChangedQuery = None,
    archived: Archived = False,
    yes: Yes = False,
    dry_run: options.DryRun = False,
) -> None:
    """Delete ended experiments with all their data.

    This deletes their metrics, logs and checkpoints.
    """
    many = Many(experiment, query, yes, dry_run, "only" if archived else "no")
    number = many.checked()
    with connect() as client:
        if number is None:
            preview = client.preview_action("delete", str(query), archived=many.archived)
            change_previewed(client, "delete", preview, many, {})
            return
        found = client.get_experiment(number)
        loss = found.loss()
        if loss.obstacle is not None:
            raise CommandError(loss.obstacle)
        num_checkpoints, size = loss.num_checkpoints, console.format_bytes(loss.checkpoint_bytes)
        console.print_note(
            f"Deleting experiment {number} ({found.name}) takes away"
            f" {console.num_trials_text(loss.num_trials)}, {loss.num_metric_points} metric values"
            f" and {num_checkpoints} checkpoint{'s' * (num_checkpoints != 1)} ({size})."
        )
        if not dry_run:
            options.confirm("Delete it?", is_confirmed=yes)
        left_behind = [] if dry_run else found.delete()
    if left_behind:
        raise CommandError(
            f"Experiment {number} is deleted, but these could not be removed:"
            f" {', '.join(left_behind)}."
        )
    console.print_answer(
        {"experiment_id": number, "is_deleted": not dry_run, **loss.model_dump()},
        "Dry run: nothing was deleted." if dry_run else f"Experiment {number} is deleted.",
    )


def move(
    project: Annotated[
        str, typer.Option("--to", metavar="PROJECT", help="The project to move into.")
    ],
    experiment: SomeExperiment = None,
    query: ChangedQuery = None,
    archived: Archived = False,
    yes: Yes = False,
    dry_run: options.DryRun = False,
) -> None:
    """Move experiments into another project, where you must be an editor as well."""
    change_experiments(
        "move",
        Many(experiment, query, yes, dry_run, "only" if archived else "no"),
        lambda found: found.edit(project=project),
        lambda data: f"Experiment {data.id} is in the project {data.project}.",
        to=project,
    )


def how_it_stands(data: "ExperimentData") -> str:
    """Return the experiment's state as a sentence, with the outlook of its running trials."""

    text = f"Experiment {data.id} is {console.experiment_word(data)}"
    if not data.num_running or not (data.state.value == "PAUSED" or data.state.is_stopping):
        return f"{text}."
    is_one = data.num_running == 1
    text += (
        f"; {console.num_trials_text(data.num_running)} {'is' if is_one else 'are'} still running"
    )
    if data.state.value in ("STOPPING_KILLED", "STOPPING_ERROR"):
        return f"{text} and will be ended."
    seconds = float(data.config.get("preemption_timeout", 600.0))
    return f"{text} and {'gets' if is_one else 'get'} up to {seconds:g} s to store a checkpoint."


def _bulk_command(
    action: Literal["pause", "activate", "cancel", "kill", "archive", "unarchive"],
    help_text: str,
    told: "Callable[[ExperimentData], str]" = how_it_stands,
) -> Callable[..., None]:
    """Return the command for a change that needs nothing but the experiments."""
    archived: Literal["no", "only"] = "only" if action == "unarchive" else "no"

    def command(
        experiment: SomeExperiment = None,
        query: ChangedQuery = None,
        yes: Yes = False,
        dry_run: options.DryRun = False,
    ) -> None:
        many = Many(experiment, query, yes, dry_run, archived)
        change_experiments(action, many, methodcaller(action), told)

    command.__name__, command.__doc__ = action, help_text
    return command


pause = _bulk_command("pause", "Pause experiments. Their trials store checkpoints and end.")
activate = _bulk_command("activate", "Continue paused experiments.")
cancel = _bulk_command("cancel", "Cancel experiments. Their trials store checkpoints and end.")
kill = _bulk_command("kill", "Kill experiments at once, without checkpoints.")
archive = _bulk_command(
    "archive",
    "Archive ended experiments. Lists do not show archived experiments.",
    lambda data: f"Experiment {data.id} is in the archive.",
)
unarchive = _bulk_command(
    "unarchive",
    "Move experiments out of the archive.",
    lambda data: f"Experiment {data.id} is no longer in the archive.",
)


def delete_checkpoints_of(
    query: str, *, keep_best: int, keep_latest: int, yes: bool, dry_run: bool
) -> None:
    """Delete the checkpoints of a query's trials, after a preview."""
    from paceline.client._http_session import ApiError

    with connect() as client:
        preview = client.preview_checkpoint_deletion(
            query, keep_best=keep_best, keep_latest=keep_latest
        )
        console.print_note("\n".join(_checkpoint_lines(preview)))
        number = len(preview.uuids)
        failed: list[dict[str, Any]] = []
        if number and not dry_run:
            options.confirm(f"Delete {_checkpoints_text(number)}?", is_confirmed=yes)
            for uuid in preview.uuids:
                try:
                    client.get_checkpoint(uuid).delete()
                except ApiError as error:
                    failed.append({"uuid": uuid, "error": str(error)})
    texts = [f"Checkpoint {one['uuid']}: {one['error']}" for one in failed]
    deleted = f"Deleted {_checkpoints_text(number - len(failed))}."
    texts.append("Dry run: nothing was deleted." if dry_run else deleted)
    answer = {**preview.model_dump(), "is_dry_run": dry_run, "failed": failed}
    console.print_answer(answer, "\n".join(texts))
    if failed:
        raise typer.Exit(1)


def _checkpoint_lines(preview: "CheckpointPreview") -> list[str]:
    lines = [
        f"delete: {_checkpoints_text(len(preview.uuids))} of"
        f" {console.num_trials_text(preview.num_trials)}"
        f" ({console.format_bytes(preview.num_bytes)} freed)."
    ]
    if preview.num_kept:
        lines.append(f"  Kept: {preview.num_kept}, the best or latest of their trials.")
    return lines + refusal_lines(preview.refused)


def _checkpoints_text(number: int) -> str:
    return f"{number} checkpoint{'s' * (number != 1)}"
