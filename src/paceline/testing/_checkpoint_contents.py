"""Checkpoints of any trainer, read without running their pickles, and compared by content."""

import filecmp
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.testing._compare_runs import Difference, compare_values

# Kinds in the order of cause and effect within a step.
KINDS = ("data order", "random state", "learning rate", "loss", "optimizer state", "weights")
STANDARD_KINDS = frozenset({"learning rate", "loss", "optimizer state", "weights"})
DAMAGED, UNREADABLE = "damaged", "unreadable"
# Kind of unreadable files that hold neither weights nor the optimizer's state.
UNREADABLE_ASIDE = "unreadable setting"
# The first pattern found in the path within a file, or else in the file's name, decides.
_KIND_PATTERNS = (
    # Lightning's counters and callbacks, with names of models and optimizers in them.
    ("other", r"^(?:loops|callbacks|hyper_parameters)\b"),
    ("timing", r"runtime|per_second|flos|memory|seconds|elapsed|duration|throughput|_time\b|\btps"),
    ("random state", r"rng|random|generator"),
    ("data order", r"sampler|dataloader|dl_state|data_loader|dataset|data_iter"),
    ("learning rate", r"(\b|_)lr(s|\b)|learning_rate|scheduler"),
    ("loss", r"loss|perplexity"),
    ("optimizer state", r"optim|exp_avg|momentum|grad_scaler"),
    ("weights", r"model|state_dict|weight|bias|\bema|\bnet\b|safetensors"),
)
_RANKS = re.compile(r"rank[_-]?(\d+)|__(\d+)_\d+\.distcp|(?:rng_state|random_states)_(\d+)\.")
# Texts of objects that differ in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DEEPEST = 40
_TENSOR_FILES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")


class UnreadableFileError(Exception):
    """Raised when a file of a checkpoint cannot be read; `kind` says why."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def difference_kind(file: str, path: str = "") -> str:
    """Return the kind of a difference: one of `KINDS`, "timing" or "other"."""
    for text in (path.lower(), file.lower()):
        kind = next((kind for kind, part in _KIND_PATTERNS if re.search(part, text)), None)
        if kind is not None:
            return kind
    return "other"


def state_rank(text: str) -> int | None:
    """Return the rank named in a `place:path`; None for a state shared by all ranks."""
    found = _RANKS.search(text)
    return next((int(group) for group in found.groups() if group), None) if found else None


def compare_checkpoints(
    checkpoint: str,
    left: Mapping[str, Path],
    right: Mapping[str, Path],
    step: int | None,
    *,
    unpickle: bool,
) -> Iterator[Difference]:
    """Yield how two checkpoints differ, without timings.

    Args:
        checkpoint: Their path.
        left: The files of the straight run's checkpoint by name.
        right: Those of the resumed run.
        step: Their step.
        unpickle: Read files that need full unpickling, which runs code in them.
    """
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            having = "the straight run" if name in left else "the resumed one"
            found = [Difference(place=name, path="", detail=f"only {having} has this file")]
        else:
            found = list(_compare_files(name, left[name], right[name], unpickle=unpickle))
        for one in found:
            kind = difference_kind(one.place, one.path)
            if one.kind == DAMAGED:
                kind = DAMAGED
            elif one.kind == UNREADABLE:
                kind = UNREADABLE if kind in STANDARD_KINDS else UNREADABLE_ASIDE
            if kind != "timing":
                rank = state_rank(f"{one.place}:{one.path}")
                is_single = PurePosixPath(checkpoint).name == one.place
                place = checkpoint if is_single else f"{checkpoint}/{one.place}"
                yield replace(one, place=place, kind=kind, step=step, rank=rank)


def _compare_files(name: str, left: Path, right: Path, *, unpickle: bool) -> Iterator[Difference]:
    is_dcp = left.name == ".metadata"
    # DCP's files are read through `.metadata`: their bytes hold offsets and times as well.
    if left.suffix == ".distcp" or (not is_dcp and filecmp.cmp(left, right, shallow=False)):
        return
    contents = []
    for path, run in ((left, "the straight run"), (right, "the resumed one")):
        try:
            contents.append(read_file(path, unpickle=unpickle))
        except UnreadableFileError as error:
            detail = f"the bytes differ, and in {run} {error}"
            yield Difference(place=name, path="", detail=detail, kind=error.kind)
            return
    if contents == [None, None]:
        yield Difference(place=name, path="", detail="the bytes differ")
    elif is_dcp:
        parent = name.removesuffix(".metadata")
        for file in sorted(contents[0].keys() | contents[1].keys()):
            yield from compare_values(
                parent + file, contents[0].get(file, {}), contents[1].get(file, {})
            )
    else:
        yield from compare_values(name, *contents)


def read_file(path: Path, *, unpickle: bool) -> Any:
    """Return a file's content as tensors and plain values; None for other kinds of file.

    Raises:
        UnreadableFileError: The file is damaged, or needs full unpickling.
    """
    import json

    try:
        if path.name == ".metadata":
            return _read_dcp(path.parent, unpickle=unpickle)
        if path.suffix == ".safetensors":
            from safetensors.torch import load

            return load(path.read_bytes())
        if path.suffix == ".json":
            return json.loads(path.read_bytes())
        if path.suffix in _TENSOR_FILES:
            return plain_value(_load_torch(path.read_bytes(), unpickle=unpickle))
    except UnreadableFileError:
        raise
    except Exception as error:  # damaged files and foreign pickles fail in any way
        summary = str(error).partition("\n")[0]
        raise UnreadableFileError(
            DAMAGED, f"the file is damaged or incomplete ({type(error).__name__}: {summary})"
        ) from error
    return None


def _read_dcp(directory: Path, *, unpickle: bool) -> dict[str, dict[str, Any]]:
    from paceline._training.engine.checkpoints.stored_tensors import DcpFiles

    contents: dict[str, dict[str, Any]] = {}
    for file, name, value in DcpFiles(directory).values():
        if isinstance(value, bytes):
            value = plain_value(_load_torch(value, unpickle=unpickle))
            # Loaders hide their state in a pickle of their own.
            if isinstance(value, bytes) and value.startswith(b"\x80"):
                with suppress(UnreadableFileError):
                    value = plain_value(_load_pickle(value, unpickle=unpickle))
        contents.setdefault(file, {})[name] = value
    return contents


def _load_torch(data: bytes, *, unpickle: bool) -> Any:
    import pickle

    import torch

    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if unpickle:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise
        raise UnreadableFileError(
            UNREADABLE,
            f"the file can be read only by full unpickling, which runs code in it ({found[1]})."
            " Hint: `--allow-unpickling`, if you trust the script",
        ) from error


def _load_pickle(data: bytes, *, unpickle: bool) -> Any:
    import pickle

    class PlainUnpickler(pickle.Unpickler):
        """Unpickler of plain values: loads no class and calls nothing."""

        def find_class(self, module: str, name: str) -> Any:
            raise UnreadableFileError(UNREADABLE, f"it needs {module}.{name}")

    return pickle.loads(data) if unpickle else PlainUnpickler(io.BytesIO(data)).load()  # noqa: S301


def _numpy_globals() -> list[Any]:
    """Return NumPy's functions for plain arrays: most trainers pickle NumPy's random state."""
    import numpy as np

    numbers = {type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}
    scalar = np.float64(0).__reduce__()[0]
    return [np.empty(0).__reduce__()[0], scalar, np.ndarray, np.dtype, *numbers]


def comparable_name(path: str) -> str:
    """Return a path without the numbers that Lightning adds when a run is resumed."""
    return re.sub(r"-v\d+(?=\.ckpt$)", "", re.sub(r"version_\d+/", "", path))


def plain_value(value: Any, depth: int = 0) -> Any:
    """Return a value with arrays as lists and objects as dictionaries of their attributes."""
    if hasattr(value, "untyped_storage") or depth > _DEEPEST:
        return value
    if isinstance(value, Mapping):
        return {key: plain_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item, depth + 1) for item in value]
    if type(value).__module__ == "numpy":
        return value.tolist()
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return plain_value(vars(value), depth + 1)
    if isinstance(value, str):
        return comparable_name(value)
    if isinstance(value, (int, float, bytes, type(None))):
        return value
    return _ADDRESS.sub("", repr(value))
