"""Commands `paceline checkpoint`: list, download, export and delete."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._command_groups import CommandGroup
from paceline.cli._commands.bulk_commands import delete_checkpoints_of
from paceline.cli._completions import complete_checkpoint
from paceline.cli._connection import SHORTEST_PREFIX, checkpoint_by_prefix, connect
from paceline.cli._errors import CommandError
from paceline.core._read_runs import RUNS_DIRECTORY, list_runs, storage_at, summarize_run
from paceline.storage._checkpoint_errors import StorageNotInstalledError
from paceline.storage._checkpoint_storage import restored
from paceline.storage._directory_storage import DirectoryStorage
from paceline.storage._storage_from_url import checkpoint_at, directory_of_checkpoint

if TYPE_CHECKING:
    from paceline.storage._checkpoint_storage import CheckpointStorage


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Directory, URL or UUID of a checkpoint. For a local run, the first characters of"
            " the UUID are enough. With --run it can be `latest`.",
            metavar="CHECKPOINT",
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            help="New file, such as weights.safetensors; a directory with --max-shard-size.",
            metavar="FILE",
        ),
    ],
    model: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Index of the model in the order of `wrap_model`."),
    ] = 0,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Write files of this size at most, such as 5GB, with an index, as Transformers"
            " reads them.",
        ),
    ] = None,
    file_format: Annotated[
        Literal["safetensors", "dcp"],
        typer.Option(
            "--format",
            help="`dcp` writes a directory of torch.distributed.checkpoint.",
        ),
    ] = "safetensors",
    optimizer: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="With --format dcp, also write the state of an optimizer of the model: its index"
            " in the order of `wrap_optimizer`.",
        ),
    ] = None,
    repeat_tied: Annotated[
        bool, typer.Option("--repeat-tied", help="Write tied weights under each of their names.")
    ] = False,
    key: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of the model in save_checkpoint, for a checkpoint of a train function. For a"
            " directory of torch.distributed.checkpoint: prefix of the names of the weights.",
        ),
    ] = "model",
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="RUN_DIR",
            help="Run with the checkpoint, as for `runs show`. By default the command searches"
            " ./paceline_runs and then the master.",
        ),
    ] = None,
) -> None:
    """Write the weights of a model as safetensors or in torch.distributed.checkpoint format.

    Directories and local runs need no master. The command needs little memory, however large the
    model is. Checkpoints in an object store, and those of the master, are downloaded first.
    """

    arguments: dict[str, Any] = {"model": model, "key": key}
    if file_format == "dcp":
        arguments |= {"optimizer": optimizer}
    elif optimizer is not None:
        raise CommandError("--optimizer needs --format dcp.")
    if file_format == "safetensors":
        arguments |= {"max_shard_size": max_shard_size, "repeat_tied": repeat_tied}
    elif max_shard_size is not None or repeat_tied:
        raise CommandError("--max-shard-size and --repeat-tied need --format safetensors.")
    _check_export_output(output, is_directory=max_shard_size is not None)
    try:
        with _files_to_export(checkpoint, run) as path:
            _write_export(path, output, file_format, arguments)
    except (ValueError, OSError) as error:
        # Message of the cause: the error may name a local copy unknown to the user.
        raise CommandError(f"Checkpoint {checkpoint!r} cannot be exported: {error}") from error
    console.print_answer({"path": str(output)}, str(output))


def _check_export_output(output: Path, *, is_directory: bool) -> None:
    if is_directory:
        if output.exists() and not output.is_dir():
            raise CommandError(
                f"`FILE` must be a directory with --max-shard-size, but {str(output)!r} is a file."
            )
        return
    if output.exists():
        raise CommandError(f"`FILE` must be a new file, but {str(output)!r} is there already.")
    if not output.absolute().parent.is_dir():
        raise CommandError(
            f"`FILE` must lie in a directory, but {str(output.absolute().parent)!r} is none."
        )


@contextmanager
def _files_to_export(checkpoint: str, run: Path | None) -> Iterator[Path]:
    """Give a directory with the verified files of a checkpoint."""

    path = Path(checkpoint)
    if run is None and path.is_dir():
        with _directory_to_export(path) as directory:
            yield directory
        return
    if run is None and "://" in checkpoint:
        with directory_of_checkpoint(checkpoint) as directory:
            yield directory
        return
    found = _export_in_runs_here(checkpoint) if run is None else _export_in_run(checkpoint, run)
    if found is not None:
        with restored(*found) as directory:
            yield directory
        return
    with TemporaryDirectory(prefix="paceline-") as temporary:
        yield _export_from_master(checkpoint, Path(temporary) / "checkpoint")


@contextmanager
def _directory_to_export(path: Path) -> Iterator[Path]:

    if (path / "run.json").exists():
        raise CommandError(
            f"`CHECKPOINT` must be a checkpoint, but {str(path)!r} is a run. Hint:"
            f" paceline checkpoint export latest FILE --run {path}"
        )
    place = path.absolute()
    if _uuid_of(place) != place.name:
        # A copy, such as `download` makes: it was verified then.
        yield path
        return
    with restored(DirectoryStorage(place.parent), place.name) as directory:
        yield directory


def _uuid_of(path: Path) -> str | None:
    """Return the UUID in a directory's manifest; None without a readable manifest."""
    try:
        uuid = json.loads((path / "manifest.json").read_bytes())["uuid"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(uuid)


def _export_in_run(checkpoint: str, run: Path) -> "tuple[CheckpointStorage, str]":
    from paceline.cli._commands.runs_commands import find_run

    path = find_run(run)
    storage = storage_at(path)
    if checkpoint == "latest":
        latest = summarize_run(path).latest_checkpoint
        if latest is None:
            raise CommandError(f"The run must have a checkpoint, but {str(path)!r} has none.")
        return storage, latest
    fitting = [uuid for uuid in storage.list() if uuid.startswith(checkpoint)]
    if len(fitting) != 1:
        raise CommandError(
            f"`CHECKPOINT` must fit one checkpoint of {str(path)!r}, but {checkpoint!r} fits"
            f" {', '.join(fitting) or 'none'}."
        )
    return storage, fitting[0]


def _export_in_runs_here(checkpoint: str) -> "tuple[CheckpointStorage, str] | None":

    if len(checkpoint) < SHORTEST_PREFIX:
        return None
    found: dict[str, CheckpointStorage] = {}
    for summary in list_runs(Path(RUNS_DIRECTORY)):
        try:
            storage = storage_at(summary.path)
        except StorageNotInstalledError:
            # The missing package matters only for the run that has the checkpoint.
            if summary.latest_checkpoint and summary.latest_checkpoint.startswith(checkpoint):
                raise
            continue
        found |= {uuid: storage for uuid in storage.list() if uuid.startswith(checkpoint)}
    if len(found) > 1:
        raise CommandError(
            f"`CHECKPOINT` must fit one checkpoint, but {checkpoint!r} fits {', '.join(found)}."
        )
    return next(((storage, uuid) for uuid, storage in found.items()), None)


def _export_from_master(uuid: str, target: Path) -> Path:
    from paceline.client._http_session import MasterUnreachableError

    try:
        with connect() as client:
            return checkpoint_by_prefix(client, uuid).download(target)
    except MasterUnreachableError as error:
        raise CommandError(
            f"`CHECKPOINT` must be a directory, or the UUID of a checkpoint of a run in"
            f" ./paceline_runs or of a master, but {uuid!r} is neither of the first two. {error}"
        ) from error


def _write_export(path: Path, output: Path, file_format: str, arguments: dict[str, Any]) -> None:
    from paceline import pytorch

    function: Any = pytorch.export_dcp if file_format == "dcp" else pytorch.export_weights
    exported = function(path, output, **arguments)
    if exported.base is not None:
        typer.echo(
            f"The file holds what was trained. It must be added to the base"
            f" {exported.base['name'] or 'that was frozen'}:"
            " model.load_state_dict(weights, strict=False)",
            err=True,
        )
    if exported.left_out:
        typer.echo(f"Left out, as they are no tensors: {', '.join(exported.left_out)}", err=True)
    if exported.tied:
        names = ", ".join(f"{name} (as {first})" for name, first in exported.tied.items())
        typer.echo(f"Left out, as they are tied to others: {names}", err=True)


checkpoint_app = CommandGroup(
    help="List, download, export and delete checkpoints.",
)
checkpoint_app.command("export")(export)

OutputDirectory = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="New directory. The default is ./checkpoints/UUID.", metavar="DIR"
    ),
]


@checkpoint_app.command("list", is_list=True)
def list_checkpoints(
    experiment: options.ExperimentId,
    best: Annotated[bool, typer.Option("--best", help="Sort by metric, best first.")] = False,
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Also show checkpoints with deleted files.")
    ] = False,
) -> None:
    """List the checkpoints of an experiment, latest first."""

    with connect() as client:
        found = client.get_experiment(experiment).checkpoints(sort_by="metric" if best else "steps")
    shown = [c for c in found if deleted or c.state.value != "DELETED"]
    rows: list[list[Any]] = []
    for c in shown:
        row = [c.uuid, c.trial_id, c.steps_completed, c.metric, console.format_bytes(c.data.size)]
        rows.append([*row, console.state_text(c.state.value)] if deleted else row)
    titles = ["UUID", "Trial", "Batches", "Metric", "Size"]
    console.print_list(
        [checkpoint.data for checkpoint in shown],
        [*titles, "State"] if deleted else titles,
        rows,
        right=titles[1:],
        empty="No checkpoints.",
    )


@checkpoint_app.command()
def describe(uuid: options.Uuid, json: options.Json = False) -> None:
    """Show the metadata and files of a checkpoint."""

    with connect() as client:
        checkpoint = checkpoint_by_prefix(client, uuid)
    data = checkpoint.data
    if json:
        console.print_json(data)
        return
    console.print_facts(
        [
            ("UUID", data.uuid),
            ("State", console.state_text(data.state.value)),
            ("Trial", f"{data.trial_id} (experiment {data.experiment_id})"),
            ("Batches", data.steps_completed),
            ("Metric", checkpoint.metric),
            ("Metadata", console.format_values(data.metadata)),
            ("Stored", console.format_moment(data.created_at)),
            ("Storage", data.storage),
        ]
    )
    console.stdout().print()
    files = sorted(data.resources.items())
    console.print_table(
        ["File", "Size"], [(n, console.format_bytes(s)) for n, s in files], right=["Size"]
    )


@checkpoint_app.command()
def download(
    uuid: Annotated[
        str,
        typer.Argument(
            help="UUID of the checkpoint or its beginning, or its URL in an object store, which"
            " needs no master.",
            metavar="UUID",
            autocompletion=complete_checkpoint,
        ),
    ],
    output: OutputDirectory = None,
    mode: Annotated[
        Literal["auto", "direct", "master"],
        typer.Option(help="Read the storage directly, or through the master."),
    ] = "auto",
) -> None:
    """Copy the files of a checkpoint into a new directory."""

    if "://" in uuid:
        path = _download_from_store(uuid, output)
    else:
        with connect() as client:
            path = checkpoint_by_prefix(client, uuid).download(output, mode=mode)
    console.print_answer({"path": str(path)}, str(path))


def _download_from_store(url: str, output: Path | None) -> Path:

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
        # A part would look like a whole checkpoint.
        shutil.rmtree(target, ignore_errors=True)
        raise
    return target


KeptNumber = Annotated[
    int, typer.Option(min=0, max=10_000, metavar="N", help="With --query: of each trial, N stay.")
]


@checkpoint_app.command()
def delete(
    uuids: Annotated[
        list[str] | None,
        typer.Argument(
            help="UUIDs of the checkpoints or their beginnings; none with --query.",
            metavar="UUID",
            autocompletion=complete_checkpoint,
        ),
    ] = None,
    glob: Annotated[
        list[str] | None,
        typer.Option(
            "--glob",
            help="Delete only files that match, as in a .gitignore. Repeat it for more patterns.",
            metavar="PATTERN",
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(
            "--query",
            "--where",
            metavar="QUERY",
            help='Delete those of all trials that a query describes, such as "ended < -30d".',
        ),
    ] = None,
    keep_best: KeptNumber = 0,
    keep_latest: KeptNumber = 0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: options.DryRun = False,
) -> None:
    """Delete the files of checkpoints, or some of the files."""
    if bool(uuids) == (query is not None) or (query is not None and glob):
        raise CommandError("Either `UUID` or `--query` must be given, and `--glob` with `UUID`.")
    if query is not None:
        delete_checkpoints_of(
            query, keep_best=keep_best, keep_latest=keep_latest, yes=yes, dry_run=dry_run
        )
        return
    if keep_best or keep_latest:
        raise CommandError("`--keep-best` and `--keep-latest` must come with `--query`.")
    with connect() as client:
        named = [checkpoint_by_prefix(client, uuid) for uuid in uuids or []]
        found = list({checkpoint.uuid: checkpoint for checkpoint in named}.values())
        for checkpoint in found:
            if checkpoint.state.value == "DELETED":
                raise CommandError(
                    f"Checkpoint {checkpoint.uuid} must have files to delete, but they were deleted"
                    " before."
                )
        names = ", ".join(checkpoint.uuid for checkpoint in found)
        which = f"the files {', '.join(glob)}" if glob else "the files"
        if dry_run:
            size = console.format_bytes(sum(checkpoint.data.size for checkpoint in found))
            text = f"Dry run: {which} of {names} ({size}) would be deleted. Nothing was deleted."
            console.print_answer([checkpoint.data for checkpoint in found], text)
            return
        options.confirm(f"Delete {which} of {names}?", is_confirmed=yes)
        texts = []
        for checkpoint in found:
            checkpoint.delete(glob or None)
            lost = len(checkpoint.data.resources)
            left = checkpoint.reload().data
            lost -= len(left.resources) if left.state.value != "DELETED" else 0
            of = f"{lost} files of " if glob else ""
            texts.append(f"Deleted {of}{checkpoint.uuid}.")
    console.print_answer([checkpoint.data for checkpoint in found], "\n".join(texts))
