"""Comparison of two runs: their facts, metrics, and checkpoints of any trainer by content."""

import filecmp
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from paceline._base import journal_records as records
from paceline._base.run_directory import RunDirectory
from paceline.core._read_runs import RUNS_DIRECTORY, read_metrics
from paceline.storage._storage_from_url import storage_from

_ZIP_START = b"PK\x03\x04"
# How the engine writes dictionaries whose keys may be integers, and tuples.
_ITEMS, _TUPLE = "$items", "$tuple"


def read_contents(path: Path) -> Any:
    """Return the content of a JSON, safetensors or torch file; None for other kinds of file."""
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".json":
        return _read_json(path)
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP_START)) == _ZIP_START
    return _read_torch(path) if is_zip else None


def _read_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, Any] = {name: file.get_tensor(name) for name in sorted(file.keys())}
            return {**tensors, "__metadata__": file.metadata()}
    except SafetensorError:
        return None


def _read_json(path: Path) -> Any:
    try:
        return _plain_contents(json.loads(path.read_bytes()))
    except ValueError:
        return None


def _read_torch(path: Path) -> Any:
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError):
        # Other zip files, and torch files with classes in them: their bytes are compared.
        return None


def _plain_contents(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ITEMS}:
            return {key: _plain_contents(item) for key, item in value[_ITEMS]}
        if value.keys() == {_TUPLE}:
            return [_plain_contents(item) for item in value[_TUPLE]]
        return {key: _plain_contents(item) for key, item in value.items()}
    return [_plain_contents(item) for item in value] if isinstance(value, list) else value


class VerificationError(RuntimeError):
    """Raised when a check of exact resume cannot reach a result."""

    __module__ = "paceline.testing"


class ScriptFailedError(VerificationError):
    """Raised when the straight run fails or takes too long."""

    __module__ = "paceline.testing"


class NotResumableError(VerificationError):
    """Raised when a script does not use Paceline, or had stored no checkpoint to resume from."""

    __module__ = "paceline.testing"


class FaultMissedError(VerificationError):
    """Raised when a run ended before its fault came."""

    __module__ = "paceline.testing"


# Groups of timing metrics: their values differ in any two runs.
_TIMING_GROUPS = frozenset({"profiling", "system"})


@dataclass(slots=True, kw_only=True)
class RunAttempt:
    """Attempt in its chief's journal; `outcome` is None without a recorded end."""

    start_step: int = 0
    resumed_from: str | None = None
    checkpoints: list[records.CheckpointStored] = field(default_factory=list)
    reported_steps: list[int] = field(default_factory=list)
    outcome: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Ended run, as read from its run directory.

    Attributes:
        path: The run directory.
        attempts: Its attempts, in order.
        groups: The metric groups that are compared.
        deleted: The UUIDs of the checkpoints that the script deleted again.
        points: The fault points that it reached.
        threads: The number of torch's threads by rank.
    """

    path: Path
    attempts: list[RunAttempt]
    groups: frozenset[str]
    deleted: frozenset[str]
    points: frozenset[str] = frozenset()
    threads: Mapping[int, int] = field(default_factory=dict)

    @property
    def outcome(self) -> str | None:
        """How the last attempt ended."""
        return self.attempts[-1].outcome if self.attempts else None

    @property
    def final_checkpoint(self) -> records.CheckpointStored | None:
        """Last checkpoint stored and not deleted."""
        kept = [
            stored
            for attempt in self.attempts
            for stored in attempt.checkpoints
            if stored.uuid not in self.deleted
        ]
        return kept[-1] if kept else None

    @property
    def checkpoint_steps(self) -> list[int]:
        """The steps of the checkpoints, as they were stored."""
        return [one.steps_completed for attempt in self.attempts for one in attempt.checkpoints]

    @property
    def reported_steps(self) -> list[int]:
        """The step of each report of metrics, in order."""
        return [step for attempt in self.attempts for step in attempt.reported_steps]

    @property
    def steps_completed(self) -> int:
        """Last step reported or stored."""
        return max([*self.checkpoint_steps, *self.reported_steps], default=0)

    def metrics(self, group: str, *, first_attempt: bool = False) -> dict[int, dict[str, Any]]:
        """Return a group's metrics by step.

        Args:
            group: The metric group.
            first_attempt: Return all reports of the first attempt, instead of the reports in
                the end.
        """
        rows: dict[int, dict[str, Any]] = {}
        for row in read_metrics(RunDirectory(self.path), group):
            if row.attempt == 0 if first_attempt else not row.is_superseded:
                rows.setdefault(row.steps_completed, {}).update(row.metrics)
        return rows


def find_run(directory: Path) -> Path | None:
    """Return the run directory of a script's run in `directory`, None without any run.

    Raises:
        NotResumableError: There are several runs.
    """
    paths = [path.parent for path in (directory / RUNS_DIRECTORY).glob("*/run.json")]
    if len(paths) > 1:
        raise NotResumableError(
            f"The script must make one run, but made {len(paths)}:"
            f" {', '.join(sorted(path.name for path in paths))}. Hint: verify a script that calls"
            " `init` once."
        )
    return paths[0] if paths else None


def read_run_facts(
    path: Path, points: frozenset[str] = frozenset(), threads: Mapping[int, int] | None = None
) -> RunFacts:
    """Read all journals of a run's chief."""
    run = RunDirectory.open(path)
    attempts: dict[int, RunAttempt] = {}
    groups: set[str] = set()
    deleted: set[str] = set()
    for key in run.journal_keys():
        if key.rank:
            continue
        attempt = attempts.setdefault(key.attempt, RunAttempt())
        for entry in run.reader(key):
            record = entry.decode()
            _take_in(attempt, record)
            if isinstance(record, records.MetricsReported):
                groups.add(record.group)
            elif isinstance(record, (records.CheckpointDeleted, records.CheckpointFilesDeleted)):
                deleted.add(record.uuid)
    return RunFacts(
        path=path,
        attempts=[attempts[number] for number in sorted(attempts)],
        groups=frozenset(groups - _TIMING_GROUPS),
        deleted=frozenset(deleted),
        points=points,
        threads=threads or {},
    )


def _take_in(attempt: RunAttempt, record: object) -> None:
    if isinstance(record, records.AttemptStarted):
        attempt.start_step, attempt.resumed_from = record.steps_completed, record.resumed_from
    elif isinstance(record, records.CheckpointStored):
        attempt.checkpoints.append(record)
    elif isinstance(record, records.MetricsReported):
        attempt.reported_steps.append(record.steps_completed)
    elif isinstance(record, records.AttemptFinished):
        attempt.outcome = record.outcome


_STRAIGHT, _RESUMED = "the straight run", "the resumed one"
# A list of numbers longer than this counts its differing elements instead of naming each.
_LONG_LIST = 8
_LONGEST_TEXT = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference between a resumed run and the straight run.

    Attributes:
        place: A file of the checkpoint such as "model_0.safetensors", "checkpoint", "metadata",
            "metrics.<group>", or "run".
        path: The differing part: a tensor's name, a path in the JSON, a metric's name.
        detail: How it differs.
        kind: The part of the training that differs, such as "optimizer state"; None for scripts
            that use Paceline.
        step: The step of the checkpoint or of the logged row; None if unknown.
        rank: The rank whose own state differs, or whose file holds it; None for a shared file.
    """

    place: str
    path: str
    detail: str
    kind: str | None = None
    step: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.place}{': ' if self.path else ''}{self.path}: {self.detail}"


def compare_runs(
    straight: RunFacts, resumed: RunFacts, ignore: Sequence[str] = ()
) -> list[Difference]:
    """Return how the ends of two runs differ.

    Args:
        straight: The run that was not interrupted.
        resumed: The run that was.
        ignore: Patterns of `place:path` to leave out, such as "metrics.*:seconds".
    """
    found = [*_compare_checkpoints(straight, resumed), *_compare_metrics(straight, resumed)]
    return without_ignored(found, ignore)


def without_ignored(found: Sequence[Difference], ignore: Sequence[str]) -> list[Difference]:
    """Return the differences whose `place:path` matches no pattern."""
    return [
        difference
        for difference in found
        if not any(fnmatchcase(f"{difference.place}:{difference.path}", one) for one in ignore)
    ]


def first_difference_before(straight: RunFacts, interrupted: RunFacts, step: int) -> int | None:
    """Return the first step up to `step` with reports differing before a fault; None if equal."""
    steps = []
    for group in straight.groups & interrupted.groups:
        rows = straight.metrics(group)
        for done, metrics in interrupted.metrics(group, first_attempt=True).items():
            if done <= step and done in rows and not same_bits(rows[done], metrics):
                steps.append(done)
    return min(steps, default=None)


# ---- checkpoints -----------------------------------------------------------------------------


def _compare_checkpoints(straight: RunFacts, resumed: RunFacts) -> Iterator[Difference]:
    left, right = straight.final_checkpoint, resumed.final_checkpoint
    if left is None or right is None:
        if left is not right:
            having = _STRAIGHT if right is None else _RESUMED
            yield Difference(place="checkpoint", path="", detail=f"only {having} has one")
        return
    yield from compare_values("metadata", left.metadata, right.metadata)
    with (
        storage_from(left.storage).restore_path(left.uuid) as left_path,
        storage_from(right.storage).restore_path(right.uuid) as right_path,
    ):
        for name in sorted(left.resources.keys() | right.resources.keys()):
            if name not in left.resources or name not in right.resources:
                having = _STRAIGHT if name in left.resources else _RESUMED
                yield Difference(place=name, path="", detail=f"only {having} has this file")
            else:
                yield from _compare_files(name, left_path / name, right_path / name)


def _compare_files(name: str, left: Path, right: Path) -> Iterator[Difference]:
    if filecmp.cmp(left, right, shallow=False):
        return
    left_contents, right_contents = read_contents(left), read_contents(right)
    if left_contents is None or right_contents is None:
        sizes = [one.stat().st_size for one in (left, right)]
        detail = "the bytes differ"
        if sizes[0] != sizes[1]:
            detail = f"{sizes[0]} bytes in {_STRAIGHT}, {sizes[1]} in {_RESUMED}"
        yield Difference(place=name, path="", detail=detail)
    else:
        yield from compare_values(name, left_contents, right_contents)


def compare_values(place: str, left: Any, right: Any, path: str = "") -> Iterator[Difference]:
    """Return the differences between two nested values, tensors bit by bit."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in [*left, *(key for key in right if key not in left)]:
            below = f"{path}.{key}" if path else str(key)
            if key in left and key in right:
                yield from compare_values(place, left[key], right[key], below)
            else:
                having = _STRAIGHT if key in left else _RESUMED
                yield Difference(place=place, path=below, detail=f"only {having} has it")
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        yield from _compare_lists(place, left, right, path)
    elif hasattr(left, "untyped_storage") and hasattr(right, "untyped_storage"):
        detail = _tensor_difference(left, right)
        if detail:
            yield Difference(place=place, path=path, detail=detail)
    elif not same_bits(left, right):
        detail = f"{_short(left)} in {_STRAIGHT}, {_short(right)} in {_RESUMED}"
        yield Difference(place=place, path=path, detail=detail)


def _compare_lists(
    place: str, left: Sequence[Any], right: Sequence[Any], path: str
) -> Iterator[Difference]:
    if len(left) != len(right):
        detail = f"{len(left)} elements in {_STRAIGHT}, {len(right)} in {_RESUMED}"
        yield Difference(place=place, path=path, detail=detail)
    elif len(left) > _LONG_LIST and all(isinstance(one, (int, float)) for one in (*left, *right)):
        num_wrong = sum(not same_bits(a, b) for a, b in zip(left, right, strict=True))
        if num_wrong:
            detail = f"{num_wrong} of {len(left)} elements differ"
            yield Difference(place=place, path=path, detail=detail)
    else:
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from compare_values(place, *pair, f"{path}[{index}]")


def _tensor_difference(left: Any, right: Any) -> str | None:
    """Return how two tensors differ in their bits, None if they do not."""
    import torch

    if (left.shape, left.dtype) != (right.shape, right.dtype):
        kinds = [f"{one.dtype} of shape {tuple(one.shape)}" for one in (left, right)]
        return f"{kinds[0]} in {_STRAIGHT}, {kinds[1]} in {_RESUMED}"
    left, right = left.detach().cpu().contiguous(), right.detach().cpu().contiguous()
    if not left.numel():
        return None
    # Bytes instead of values: NaN differs from itself, and -0.0 equals 0.0.
    as_bytes = [one.reshape(-1, 1).view(torch.uint8) for one in (left, right)]
    num_wrong = int((as_bytes[0] != as_bytes[1]).any(dim=1).sum())
    if not num_wrong:
        return None
    detail = f"{num_wrong} of {left.numel()} elements differ"
    if left.is_floating_point():
        largest = (left.double() - right.double()).abs().nan_to_num().max().item()
        detail += f", by up to {largest:.3g}"
    return detail


# ---- metrics ---------------------------------------------------------------------------------


def _compare_metrics(straight: RunFacts, resumed: RunFacts) -> Iterator[Difference]:
    for group in sorted(straight.groups | resumed.groups):
        left, right = straight.metrics(group), resumed.metrics(group)
        names = {name for row in (*left.values(), *right.values()) for name in row}
        for name in sorted(names):
            wrong = [
                step
                for step in sorted(left.keys() | right.keys())
                if not same_bits(left.get(step, {}).get(name), right.get(step, {}).get(name))
            ]
            if wrong:
                step = wrong[0]
                values = [_short(rows.get(step, {}).get(name)) for rows in (left, right)]
                detail = (
                    f"{len(wrong)} of {len(left.keys() | right.keys())} rows differ, the first at"
                    f" step {step}: {values[0]} in {_STRAIGHT}, {values[1]} in {_RESUMED}"
                )
                yield Difference(place=f"metrics.{group}", path=name, detail=detail)


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two plain values are the same, NaN and the sign of zero included."""
    # The shortest text of a float that gives the same float again shows all of its bits that
    # count, a NaN's and the sign of zero among them.
    return repr(left) == repr(right)


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


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
            found = list(_compare_contents(name, left[name], right[name], unpickle=unpickle))
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


def _compare_contents(
    name: str, left: Path, right: Path, *, unpickle: bool
) -> Iterator[Difference]:
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
    from paceline._training.engine.checkpoints.dcp_files import DcpFiles

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
