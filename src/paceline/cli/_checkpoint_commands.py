"""`paceline checkpoint`: list, download, export and delete checkpoints."""

import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.cli._command_options import Json, Uuid
from paceline.cli._errors import CommandError
from paceline.cli._export_command import export

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, download, export and delete checkpoints.",
)
app.command("export")(export)

OutputDirectory = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="New directory. The default is ./checkpoints/UUID.", metavar="DIR"
    ),
]


@app.command("list")
def list_checkpoints(
    experiment: Annotated[int, typer.Argument(help="Number of the experiment.", metavar="ID")],
    best: Annotated[bool, typer.Option("--best", help="Sort by metric, best first.")] = False,
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Also show checkpoints with deleted files.")
    ] = False,
    json: Json = False,
) -> None:
    """List the checkpoints of an experiment, latest first."""
    from paceline.cli._connection import connect
    from paceline.cli._console_output import format_bytes, print_json, print_table, state_text

    with connect() as client:
        found = client.get_experiment(experiment).checkpoints(sort_by="metric" if best else "steps")
    shown = [c for c in found if deleted or c.state.value != "DELETED"]
    if json:
        print_json([checkpoint.data for checkpoint in shown])
        return
    rows: list[list[Any]] = []
    for c in shown:
        row = [c.uuid, c.trial_id, c.steps_completed, c.metric, format_bytes(c.data.size)]
        rows.append([*row, state_text(c.state.value)] if deleted else row)
    titles = ["UUID", "Trial", "Batches", "Metric", "Size"]
    print_table(
        [*titles, "State"] if deleted else titles,
        rows,
        right=titles[1:],
        empty="No checkpoints.",
    )


@app.command()
def describe(uuid: Uuid, json: Json = False) -> None:
    """Show the metadata and files of a checkpoint."""
    from paceline.cli._connection import connect
    from paceline.cli._console_output import (
        console,
        format_bytes,
        format_moment,
        format_values,
        print_facts,
        print_json,
        print_table,
        state_text,
    )

    with connect() as client:
        checkpoint = client.get_checkpoint(uuid)
    data = checkpoint.data
    if json:
        print_json(data)
        return
    print_facts(
        [
            ("UUID", data.uuid),
            ("State", state_text(data.state.value)),
            ("Trial", f"{data.trial_id} (experiment {data.experiment_id})"),
            ("Batches", data.steps_completed),
            ("Metric", checkpoint.metric),
            ("Metadata", format_values(data.metadata)),
            ("Stored", format_moment(data.created_at)),
            ("Storage", data.storage),
        ]
    )
    console().print()
    files = sorted(data.resources.items())
    print_table(["File", "Size"], [(n, format_bytes(s)) for n, s in files], right=["Size"])


@app.command()
def download(
    uuid: Annotated[
        str,
        typer.Argument(
            help="UUID of the checkpoint, or its URL in an object store, which needs no master.",
            metavar="UUID",
        ),
    ],
    output: OutputDirectory = None,
    mode: Annotated[
        Literal["auto", "direct", "master"],
        typer.Option(help="Read the storage directly, or through the master."),
    ] = "auto",
) -> None:
    """Copy the files of a checkpoint into a new directory."""
    from paceline.cli._connection import connect

    if "://" in uuid:
        typer.echo(str(_download_from_store(uuid, output)))
        return
    with connect() as client:
        path = client.get_checkpoint(uuid).download(output, mode=mode)
    typer.echo(str(path))


def _download_from_store(url: str, output: Path | None) -> Path:
    from paceline.storage import checkpoint_at

    try:
        storage, uuid = checkpoint_at(url)
    except ValueError as error:
        raise CommandError(str(error)) from error
    target = Path("checkpoints", uuid) if output is None else output
    if target.exists():
        raise CommandError(f"`DIR` must be a new directory, but {str(target)!r} is there already.")
    try:
        storage.download(uuid, target)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return target


@app.command()
def delete(
    uuids: Annotated[list[str], typer.Argument(help="UUIDs of the checkpoints.", metavar="UUID")],
    glob: Annotated[
        list[str] | None,
        typer.Option(
            "--glob",
            help="Delete only files that match, as in a .gitignore. Repeat it for more patterns.",
            metavar="PATTERN",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete the files of checkpoints, or some of the files."""
    from paceline.cli._connection import connect

    with connect() as client:
        found = [client.get_checkpoint(uuid) for uuid in dict.fromkeys(uuids)]
        for checkpoint in found:
            if checkpoint.state.value == "DELETED":
                raise CommandError(
                    f"Checkpoint {checkpoint.uuid} must have files to delete, but they were deleted"
                    " before."
                )
        names = ", ".join(checkpoint.uuid for checkpoint in found)
        if not yes:
            which = f"the files {', '.join(glob)}" if glob else "the files"
            typer.confirm(f"Delete {which} of {names}?", abort=True)
        for checkpoint in found:
            checkpoint.delete(glob or None)
            if not glob:
                typer.echo(f"Deleted {checkpoint.uuid}.")
                continue
            lost = len(checkpoint.data.resources)
            left = checkpoint.reload().data
            lost -= len(left.resources) if left.state.value != "DELETED" else 0
            typer.echo(f"Deleted {lost} files of {checkpoint.uuid}.")
