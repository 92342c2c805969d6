"""`paceline checkpoint export`: a model's weights in one file that anything can read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

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
            help="Directory or UUID of a checkpoint. For a local run, the first characters of the"
            " UUID are enough. With --run it can be `latest`.",
            metavar="CHECKPOINT",
        ),
    ],
    output: Annotated[
        Path, typer.Argument(help="New file, such as weights.safetensors.", metavar="FILE")
    ],
    model: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Index of the model in the order of `wrap_model`."),
    ] = 0,
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
    """Write the weights of a model as one safetensors file.

    Directories and local runs need no master. Tied weights are written under each of their names.
    """
    if output.exists():
        raise CommandError(f"`FILE` must be a new file, but {str(output)!r} is there already.")
    if not output.absolute().parent.is_dir():
        raise CommandError(
            f"`FILE` must lie in a directory, but {str(output.absolute().parent)!r} is none."
        )
    with _files_of(checkpoint, run) as path:
        _write(path, model, output)
    typer.echo(str(output))


@contextmanager
def _files_of(checkpoint: str, run: Path | None) -> Iterator[Path]:
    """Give a directory with the verified files of a checkpoint."""
    path = Path(checkpoint)
    if run is None and path.is_dir():
        with _given_directory(path) as directory:
            yield directory
        return
    found = _in_run(checkpoint, run) if run is not None else _in_runs_here(checkpoint)
    if found is not None:
        storage, uuid = found
        with storage.restore_path(uuid) as directory:
            yield directory
        return
    with TemporaryDirectory(prefix="paceline-") as temporary:
        yield _from_master(checkpoint, Path(temporary) / "checkpoint")


@contextmanager
def _given_directory(path: Path) -> Iterator[Path]:
    from paceline.storage import DirectoryStorage

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
    with DirectoryStorage(place.parent).restore_path(place.name) as directory:
        yield directory


def _uuid_of(path: Path) -> str | None:
    """Return the UUID that a directory's manifest names, if there is one that can be read."""
    try:
        uuid = json.loads((path / "manifest.json").read_bytes())["uuid"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(uuid)


def _in_run(checkpoint: str, run: Path) -> "tuple[CheckpointStorage, str]":
    from paceline.cli._runs import find_run
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


def _in_runs_here(checkpoint: str) -> "tuple[CheckpointStorage, str] | None":
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


def _from_master(uuid: str, target: Path) -> Path:
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


def _write(path: Path, model: int, output: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from paceline.engine import read_training
    from paceline.pytorch import load_weights_from_checkpoint_path

    weights = load_weights_from_checkpoint_path(path, model)
    bases = read_training(path).get("bases")
    if bases and bases[model]:
        typer.echo(
            f"The file holds what was trained. It must be added to the base"
            f" {bases[model]['name'] or 'that was frozen'}:"
            " model.load_state_dict(weights, strict=False)",
            err=True,
        )
    left_out = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if left_out:
        typer.echo(f"Left out, as they are no tensors: {', '.join(left_out)}", err=True)
    known: set[int] = set()
    tensors: dict[str, Any] = {}
    for name, value in weights.items():
        if name not in left_out:
            # The format refuses tensors that share memory.
            tensors[name] = value.clone() if value.data_ptr() in known else value
            known.add(value.data_ptr())
    partial = output.with_name(f".{output.name}.partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata={"format": "pt"})
        partial.chmod(mode)
        partial.rename(output)
    finally:
        partial.unlink(missing_ok=True)
