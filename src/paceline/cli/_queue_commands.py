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
        empty=f"Nothing waits for slots{'' if pool is None else f' in the pool {pool!r}'}.",
    )


@app.command("move")
def move(
    experiment: ExperimentId,
    ahead_of: Annotated[
        int | None,
        typer.Option("--ahead-of", metavar="ID", help="Move it directly ahead of this experiment."),
    ] = None,
    behind: Annotated[
        int | None,
        typer.Option("--behind", metavar="ID", help="Move it directly behind this experiment."),
    ] = None,
    front: Annotated[bool, typer.Option("--front", help="Move it to the front.")] = False,
    end: Annotated[bool, typer.Option("--end", help="Move it to the end.")] = False,
) -> None:
    """Move an experiment in the queue of its pool, among those of the same priority."""
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


def _rank(priority: int | None, weight: float | None) -> str:
    if priority is not None:
        return f"priority {priority}"
    return "" if weight is None else f"weight {weight:g}"
