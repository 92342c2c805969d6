"""Adapters of other trainers: where checkpoints lie, when one is complete, how losses are read."""

import csv
import json
import math
import os
import re
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.testing._checkpoint_contents import difference_kind

_LOOK_S = 0.05
_WRITING_S = 5
_STEP = re.compile(r"(?:step|checkpoint|iter|iteration)[-_=]?(\d+)")
_STEP_KEYS = ("global_step", "step", "steps_completed", "iteration", "iter", "epoch")
_LOGGED = r"(?P<name>[\w/.]*(?:loss|lr|learning_rate|grad_norm|perplexity))['\"]?\s*[:= ]\s*['\"]?"
_LOGGED_VALUE = re.compile(_LOGGED + r"(?P<value>-?\d[\d.]*(?:e[+-]?\d+)?|nan|inf)", re.IGNORECASE)
_LOGGED_STEP = re.compile(r"\b(?:global_)?(?:step|iter|iteration)['\"]?\s*[:= ]\s*(\d+)")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_LARGEST_LOG = 100_000_000

Stamps = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAdapter:
    """Layout of a library's checkpoints.

    Attributes:
        name: The name of the library.
        files: A pattern for the files of checkpoints, with the group "checkpoint"; or None.
        last_file: The file that a checkpoint gets last; None where a checkpoint is a single file.
        glob: A pattern for the path of a checkpoint, instead of `files`.
        resume_hint: How scripts resume.
        has_steps: Whether numbers in the names of checkpoints are steps.
    """

    name: str
    files: str | None = None
    last_file: str | None = None
    glob: str | None = None
    resume_hint: str = "load the newest checkpoint, if there is one"
    has_steps: bool = True

    def checkpoint(self, path: str) -> str | None:
        """Return the path of the checkpoint with a file; None if no checkpoint has it."""
        if self.files is not None:
            found = re.fullmatch(self.files, path)
            return found["checkpoint"] if found else None
        parts = PurePosixPath(path).parts
        paths = ("/".join(parts[: end + 1]) for end in range(len(parts)))
        return next((one for one in paths if fnmatchcase(one, self.glob or "")), None)

    def checkpoints(self, stamps: Stamps) -> dict[str, Stamps]:
        """Return the files of each checkpoint, complete or not."""
        found: dict[str, Stamps] = {}
        for path, stamp in stamps.items():
            checkpoint = self.checkpoint(path)
            if checkpoint is not None:
                found.setdefault(checkpoint, {})[path] = stamp
        return found

    def is_complete(self, root: Path, files: Iterable[str]) -> bool:
        """Return whether all files of a checkpoint have been written."""
        if self.last_file is not None:
            return any(PurePosixPath(path).name == self.last_file for path in files)
        return all(_is_whole(root / path) for path in files)


ADAPTERS = (
    TrainerAdapter(
        name="transformers",
        files=r"(?P<checkpoint>(?:.*/)?checkpoint-\d+)/.*",
        last_file="trainer_state.json",
        resume_hint="`trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir))`",
    ),
    TrainerAdapter(
        name="dcp",
        files=r"(?P<checkpoint>.+)/(?:\.metadata|__\d+_\d+\.distcp)",
        last_file=".metadata",
        resume_hint="in torchtitan, `checkpoint.enable`",
    ),
    TrainerAdapter(
        name="accelerate",
        files=r"(?P<checkpoint>.+)/(?:(?:model|pytorch_model|optimizer|scheduler|sampler|scaler"
        r"|dl_state_dict|random_states|custom_checkpoint)[^/]*\.(?:safetensors|bin|pkl|pt))",
        last_file="random_states_0.pkl",
        resume_hint="`accelerator.load_state()`, then `skip_first_batches`",
        # They number the calls of `save_state`.
        has_steps=False,
    ),
    TrainerAdapter(
        name="lightning",
        files=r"(?P<checkpoint>.+\.ckpt)",
        resume_hint='`trainer.fit(..., ckpt_path="last")` and `ModelCheckpoint(save_last=True)`',
    ),
    TrainerAdapter(name="torch", files=r"(?P<checkpoint>.+\.(?:pt|pth|bin|tar|safetensors))"),
)


def _is_whole(path: Path) -> bool:
    with suppress(OSError):
        with path.open("rb") as file:
            start = file.read(8)
        if start[:4] == b"PK\x03\x04":
            return zipfile.is_zipfile(path)
        if path.suffix == ".safetensors":
            return path.stat().st_size > 8 + int.from_bytes(start, "little")
        return path.stat().st_size > 0
    return False


def file_stamps(root: Path) -> Stamps:
    """Return size and time of change of a directory's files, without links and hidden ones."""
    stamps: Stamps = {}
    for parent, directories, names in os.walk(root):
        directories[:] = [name for name in directories if not name.startswith(".")]
        for name in names:
            path = os.path.join(parent, name)
            with suppress(OSError):
                if not os.path.islink(path):
                    status = os.stat(path)
                    stamp = (status.st_size, status.st_mtime_ns)
                    stamps[os.path.relpath(path, root)] = stamp
    return stamps


@dataclass(slots=True)
class CheckpointWatch:
    """Observer of the checkpoints that a script writes.

    Attributes:
        root: The directory of the run.
        adapters: The adapters to look with.
        versions: For each adapter the checkpoints in the order of their completion, with the
            seconds since the start; a checkpoint that is overwritten comes once more.
    """

    root: Path
    adapters: tuple[TrainerAdapter, ...]
    versions: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    _start: Stamps = field(default_factory=dict)
    _seen: dict[tuple[str, str], Stamps] = field(default_factory=dict)
    _last: dict[tuple[str, str], Stamps] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self._start = file_stamps(self.root)

    def look(self, *, now: bool = False) -> bool:
        """Record the checkpoints completed since the last look, with pauses unless `now`.

        Returns:
            False, for runs that are only watched.
        """
        at = time.monotonic()
        if not now and at - self._looked < _LOOK_S:
            return False
        stamps = self.new_files()
        for adapter in self.adapters:
            for checkpoint, files in adapter.checkpoints(stamps).items():
                key = (adapter.name, checkpoint)
                # Files that still grow are no checkpoint yet.
                is_settled = now or self._last.get(key) == files
                self._last[key] = files
                if (
                    is_settled
                    and self._seen.get(key) != files
                    and adapter.is_complete(self.root, files)
                ):
                    self._seen[key] = files
                    entry = (checkpoint, at - self._began)
                    self.versions.setdefault(adapter.name, []).append(entry)
        self._looked = time.monotonic()
        return False

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began

    def new_files(self) -> Stamps:
        """Return the files that the script wrote or changed."""
        found = file_stamps(self.root).items()
        return {path: stamp for path, stamp in found if self._start.get(path) != stamp}

    def complete(self, adapter: TrainerAdapter) -> tuple[dict[str, Stamps], list[str]]:
        """Return the complete checkpoints with their files, and the incomplete ones."""
        groups = adapter.checkpoints(self.new_files())
        whole = {key: v for key, v in groups.items() if adapter.is_complete(self.root, v)}
        return whole, sorted(groups.keys() - whole.keys())

    def is_writing(self, adapter: TrainerAdapter) -> bool:
        """Return whether an incomplete checkpoint was changed shortly before."""
        groups = adapter.checkpoints(self.new_files()).values()
        newest = (
            max(changed for _, changed in files.values())
            for files in groups
            if not adapter.is_complete(self.root, files)
        )
        return any(time.time_ns() - at < _WRITING_S * 1_000_000_000 for at in newest)


def checkpoint_step(checkpoint: str, content: Any = None) -> int | None:
    """Return a checkpoint's step by its name or its content; None if neither tells."""
    found = _STEP.findall(checkpoint)
    if found:
        return int(found[-1])
    if isinstance(content, Mapping):
        for key in _STEP_KEYS:
            if type(content.get(key)) is int:
                return int(content[key])
    return None


# ---- logs ------------------------------------------------------------------------------------

Rows = dict[int, dict[str, Any]]


def read_logs(root: Path, files: Stamps, output: Path) -> Rows:
    """Return logged values without timings by step and `file:name`; later files count."""
    rows: Rows = {}
    for path in sorted(files, key=lambda one: files[one][1]):
        if files[path][0] < _LARGEST_LOG:
            # A log may be cut within a line, or be of another kind.
            with suppress(OSError, ValueError, csv.Error):
                _take_rows(rows, Path(path).name, _log_rows(root / path))
    _take_rows(rows, "output", _output_rows(output))
    return rows


def _log_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.name == "trainer_state.json":
        yield from json.loads(path.read_bytes())["log_history"]
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            yield from csv.DictReader(file)
    elif path.suffix == ".jsonl":
        for line in path.read_bytes().splitlines():
            yield json.loads(line)


def _output_rows(output: Path) -> Iterator[Mapping[str, Any]]:
    for line in re.split(r"[\r\n]", _ESCAPES.sub("", output.read_text(errors="replace"))):
        step = _LOGGED_STEP.search(line)
        if step is not None:
            found = {one["name"]: one["value"] for one in _LOGGED_VALUE.finditer(line)}
            yield {**found, "step": step[1]}


def _take_rows(rows: Rows, source: str, found: Iterable[Any]) -> None:
    for row in found:
        step = next((row[key] for key in _STEP_KEYS if row.get(key) not in (None, "")), None)
        if step is None or not str(step).isdigit():
            continue
        for name, value in row.items():
            number = _number(value)
            is_timing = difference_kind(str(name)) == "timing"
            if number is not None and name not in _STEP_KEYS and not is_timing:
                rows.setdefault(int(step), {})[f"{source}:{name}"] = number


def _number(value: Any) -> float | None:
    with suppress(TypeError, ValueError):
        return float(value)
    return None


def loss_distance(left: Rows, right: Rows) -> float | None:
    """Return the largest relative distance of two runs' logged losses; None without losses."""
    distances = [0.0] if any("loss" in name for row in left.values() for name in row) else []
    for step in left.keys() & right.keys():
        for name in left[step].keys() & right[step].keys():
            a, b = left[step][name], right[step][name]
            if "loss" in name and not (a == b or (math.isnan(a) and math.isnan(b))):
                distance = abs(a - b) / max(abs(a), abs(b))
                distances.append(math.inf if math.isnan(distance) else distance)
    return max(distances, default=None)
