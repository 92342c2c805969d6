"""`paceline checkpoint export`: a model's weights in files that anything can read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli._errors import CommandError

if TYPE_CHECKING:
    from paceline.storage import CheckpointStorage

# Shorter ones fit too many checkpoints by chance.
_SHORTEST_PART = 4


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
    options: dict[str, Any] = {"model": model, "key": key}
    if file_format == "dcp":
        options |= {"optimizer": optimizer}
    elif optimizer is not None:
        raise CommandError("--optimizer needs --format dcp.")
    if file_format == "safetensors":
        options |= {"max_shard_size": max_shard_size, "repeat_tied": repeat_tied}
    elif max_shard_size is not None or repeat_tied:
        raise CommandError("--max-shard-size and --repeat-tied need --format safetensors.")
    _check_export_output(output, is_directory=max_shard_size is not None)
    try:
        with _files_to_export(checkpoint, run) as path:
            _write_export(path, output, file_format, options)
    except (ValueError, OSError) as error:
        # It may be about a copy that the user has not named.
        raise CommandError(f"Checkpoint {checkpoint!r} cannot be exported: {error}") from error
    typer.echo(str(output))


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
    from paceline.storage import directory_of_checkpoint, restored

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
    from paceline.storage import DirectoryStorage, restored

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
    """Return the UUID that a directory's manifest names, if there is one that can be read."""
    try:
        uuid = json.loads((path / "manifest.json").read_bytes())["uuid"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(uuid)


def _export_in_run(checkpoint: str, run: Path) -> "tuple[CheckpointStorage, str]":
    from paceline.cli._runs_commands import find_run
    from paceline.core import storage_at, summarize_run

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
    from paceline.core import RUNS_DIRECTORY, list_runs, storage_at
    from paceline.storage import StorageNotInstalledError

    if len(checkpoint) < _SHORTEST_PART:
        return None
    found: dict[str, CheckpointStorage] = {}
    for summary in list_runs(Path(RUNS_DIRECTORY)):
        try:
            storage = storage_at(summary.path)
        except StorageNotInstalledError:
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
    from paceline.cli._connection import connect
    from paceline.client import MasterUnreachableError

    try:
        with connect() as client:
            return client.get_checkpoint(uuid).download(target)
    except MasterUnreachableError as error:
        raise CommandError(
            f"`CHECKPOINT` must be a directory, or the UUID of a checkpoint of a run in"
            f" ./paceline_runs or of a master, but {uuid!r} is neither of the first two. {error}"
        ) from error


def _write_export(path: Path, output: Path, file_format: str, options: dict[str, Any]) -> None:
    from paceline import pytorch

    function: Any = pytorch.export_dcp if file_format == "dcp" else pytorch.export_weights
    exported = function(path, output, **options)
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
