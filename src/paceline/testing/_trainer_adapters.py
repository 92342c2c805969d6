"""Verification of other trainers' commands: adapters, and straight, killed and resumed runs."""

import logging
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from paceline.testing._script_runs import (
    EndedRun,
    Rows,
    Script,
    ScriptEnd,
    Stamps,
    file_stamps,
    read_logs,
    start_script,
)
from paceline.testing._verify_resume import MIN_REPLAYED_STEPS

_LOOK_S = 0.05
_WRITING_S = 5


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
        """Return the files of each checkpoint, complete or not; the last changed one last."""
        found: dict[str, Stamps] = {}
        for path, stamp in stamps.items():
            checkpoint = self.checkpoint(path)
            if checkpoint is not None:
                found.setdefault(checkpoint, {})[path] = stamp
        return dict(sorted(found.items(), key=lambda one: max(at for _, at in one[1].values())))

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


@dataclass(slots=True)
class CheckpointWatch:
    """Observer of the checkpoints of a running script.

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
        """Return the files written or changed by the script."""
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


# ---- logs ------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

Result = Literal["exact", "different", "not supported", "nothing resumable", "could not run"]

_REFUSALS = ("NotImplementedError", "not supported", "does not support", "unsupported")
# Results of earlier runs, which a run must not find.
_RESULTS = frozenset({"paceline_runs", "lightning_logs", "wandb", "mlruns", "__pycache__"})
_MOST_FILES, _COPIED_BYTES = 2000, 1 << 20
_LONGEST_DELAY_S = 30.0


class NoVerdictError(Exception):
    """Raised when the runs cannot be compared; `result` says why not."""

    def __init__(self, result: Result, reason: str) -> None:
        super().__init__(reason)
        self.result: Result = result


@dataclass(slots=True, kw_only=True)
class CommandRuns:
    """Runs of a command, in turn, each in the same working directory.

    Attributes:
        script: The command.
        resume_command: The command that resumes, with "{checkpoint}" for the path.
        adapters: The adapters that may find its checkpoints.
        source: The directory with the files that the command needs.
        root: Where the runs are made and kept.
        unpickle: Read files that need full unpickling.
        facts: Facts of the runs for the verdict.
        notes: Limits of the result, as sentences.
    """

    script: Script
    resume_command: tuple[str, ...]
    adapters: tuple[TrainerAdapter, ...]
    source: Path
    root: Path
    unpickle: bool
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def place(self) -> Path:
        """Working directory of each start: equal paths give equal bytes in checkpoints."""
        return self.root / "run"

    def run_all(self) -> tuple[EndedRun, EndedRun]:
        """Return the straight run and the resumed run.

        Raises:
            NoVerdictError: There is nothing to compare.
        """
        adapter, versions, watch = self._run_straight()
        end_s = watch.seconds()
        straight = self._keep("straight", watch, adapter, {})
        last = versions[-1][0]
        end = (last, straight.step(last, unpickle=self.unpickle))
        if len(versions) == 1 and max(straight.rows, default=0) <= (end[1] or 0):
            # No log shows that steps follow.
            raise _too_late(1)
        watch = self._run_killed(adapter, versions, end_s, end)
        killed = read_logs(self.place, watch.new_files(), self.place / "interrupted.log")
        unequal = (
            step
            for step in killed.keys() & straight.rows.keys()
            if any(
                repr(value) != repr(straight.rows[step].get(name, value))
                for name, value in killed[step].items()
            )
        )
        self.facts |= {
            "killed_at_step": max(killed, default=None),
            "diverged_at": min(unequal, default=None),
        }
        problem = self._resume(adapter, watch)
        return straight, self._keep("resumed", watch, adapter, killed, problem)

    def _run_straight(self) -> tuple[TrainerAdapter, list[tuple[str, float]], CheckpointWatch]:
        logger.info("Running %s straight ...", " ".join(self.script.command))
        watch = self._new_directory(self.adapters)
        end = self._start("straight", watch.look)
        if end.code != 0:
            raise NoVerdictError(
                "could not run",
                f"The command must end by itself without an error, but {self._problem(end)}",
            )
        watch.look(now=True)
        for adapter in self.adapters:
            versions = watch.versions.get(adapter.name)
            if versions:
                self.facts |= {"adapter": adapter.name, "num_checkpoints": len(versions)}
                return adapter, versions, watch
        looked_for = ", ".join(adapter.glob or adapter.name for adapter in self.adapters)
        partial = sorted({one for each in self.adapters for one in watch.complete(each)[1]})
        raise NoVerdictError(
            "nothing resumable",
            "The command must store checkpoints in its working directory, but no complete one was"
            f" found there (looked for: {looked_for})."
            + (f" Incomplete: {', '.join(partial)}." if partial else "")
            + " Hint: let it write to a relative path, or name `--checkpoints`;"
            " `--adapter paceline` is for scripts that use Paceline.",
        )

    def _run_killed(
        self,
        adapter: TrainerAdapter,
        versions: list[tuple[str, float]],
        end_s: float,
        last: tuple[str, int | None],
    ) -> CheckpointWatch:
        """Return the watch of a run that was killed after about half of its checkpoints."""
        times = [*(at for _, at in versions), end_s]
        # The longest pause in the middle third: Lightning, for example, stores two at a time.
        third = len(versions) // 3
        middle = range(max(1, third), max(1, len(versions) - third) + 1)
        wanted = max(middle, key=lambda number: times[number] - times[number - 1])
        delay_s = min((times[wanted] - times[wanted - 1]) / 2, _LONGEST_DELAY_S)
        for number, delay in ((wanted, delay_s), (wanted, 0.0), (1, 0.0)):
            logger.info("Running it again, with a kill after checkpoint %d ...", number)
            watch = self._new_directory((adapter,))
            kill = _Kill(watch, adapter, number, delay)
            end = self._start("interrupted", kill)
            if kill.is_due:
                watch.look(now=True)
                if not self._is_at_end(watch, adapter, len(versions), last):
                    return watch
            elif end.code != 0:
                raise NoVerdictError("could not run", f"The second run: {self._problem(end)}")
        raise _too_late(len(versions))

    def _is_at_end(
        self,
        watch: CheckpointWatch,
        adapter: TrainerAdapter,
        num_versions: int,
        last: tuple[str, int | None],
    ) -> bool:
        """Return whether the newest checkpoint is the last one: a resume would train nothing."""
        seen = watch.versions[adapter.name]
        run = self._run(watch, adapter, {})
        if len(seen) >= num_versions > 1 or seen[-1][0] not in run.checkpoints:
            return True
        step = run.step(seen[-1][0], unpickle=self.unpickle)
        if step is not None and last[1] is not None:
            return num_versions > 1 and step >= last[1]
        names = [name for name, _ in seen]
        return num_versions > 1 and names[-1] == last[0] and names.count(last[0]) == 1

    def _resume(self, adapter: TrainerAdapter, watch: CheckpointWatch) -> str:
        whole, partial = watch.complete(adapter)
        stored = [name for name, _ in watch.versions[adapter.name] if name in whole]
        if not stored:
            raise NoVerdictError("nothing resumable", "The kill left no complete checkpoint.")
        if partial:
            self.notes.append(f"The kill left incomplete checkpoints: {', '.join(partial)}.")
        run = self._run(watch, adapter, {})
        self.facts |= {
            "resumed_checkpoint": stored[-1],
            "resumed_from": run.step(stored[-1], unpickle=self.unpickle),
        }
        killed, start = self.facts["killed_at_step"], self.facts["resumed_from"]
        if killed is not None and start is not None and killed < start + MIN_REPLAYED_STEPS:
            # Many libraries write a log only with the next checkpoint.
            self.notes.append(
                f"The log of the killed run ends at step {killed}, at or shortly after the"
                " checkpoint: perhaps little had to be trained again."
            )
        logger.info("Resuming it from %s ...", stored[-1])
        marks = self._mark_unread(name for files in whole.values() for name in files)
        command = [word.replace("{checkpoint}", stored[-1]) for word in self.resume_command]
        self.script = replace(self.script, command=tuple(command))
        end = self._start("resumed")
        if end.code != 0:
            last = next((line for line in reversed(end.tail().splitlines()) if line.strip()), "")
            if any(word in last for word in _REFUSALS):
                raise NoVerdictError("not supported", f"The command cannot resume: {last}")
            return f"{self._ending(end)} {last}"
        if not marks:
            self.notes.append(
                "This file system keeps no access times, so that a command that begins anew, and"
                " does not resume, cannot be noticed."
            )
        elif not any(mark.stat().st_atime_ns for mark in marks):
            hint = f"let it {adapter.resume_hint}, or name the way with `--resume-command`."
            if uses_paceline(self.script.command, self.source):
                hint = (
                    "a script that uses Paceline is verified by `paceline.testing.verify_resume`,"
                    " or with `--adapter paceline`."
                )
            raise NoVerdictError(
                "not supported",
                f"The command began anew: it read none of its checkpoints. Hint: {hint}",
            )
        return ""

    def _start(self, label: str, kill_when: Callable[[], bool] | None = None) -> ScriptEnd:
        try:
            return start_script(self.script, self.place, label, kill_when=kill_when)
        except OSError as error:
            raise NoVerdictError(
                "could not run",
                "The command must be a program that can be started, but"
                f" {self.script.words()[0]!r} cannot: {error.strerror}.",
            ) from None

    def _ending(self, end: ScriptEnd) -> str:
        if end.code is None:
            return f"it took more than {self.script.timeout_s:g} s."
        return f"it ended with exit code {end.code}."

    def _problem(self, end: ScriptEnd) -> str:
        return f"{self._ending(end)}\n{end.tail()}"

    # ---- directories -------------------------------------------------------------------------

    def _new_directory(self, adapters: tuple[TrainerAdapter, ...]) -> CheckpointWatch:
        shutil.rmtree(self.place, ignore_errors=True)
        earlier = self._mirror_source()
        if earlier and not self.notes:
            self.notes.append(
                f"The runs do not see the checkpoints of earlier runs: {', '.join(earlier)}."
            )
        return CheckpointWatch(self.place, adapters)

    def _mirror_source(self) -> list[str]:
        """Copy small files of the source and link the others; return checkpoints left out.

        Directories are new, and small files copies, so that no run writes into the source.
        """
        self.place.mkdir(parents=True)
        earlier, num_files = self._earlier_checkpoints(), 0
        for parent, directories, names in os.walk(self.source):
            inside = os.path.relpath(parent, self.source)
            for name in list(directories):
                path, target = Path(parent, name), self.place / inside / name
                is_link = name.startswith(".") or path.is_symlink() or num_files > _MOST_FILES
                if name in _RESULTS or path in earlier or path == self.root:
                    directories.remove(name)
                elif is_link and path not in self.root.parents:
                    directories.remove(name)
                    target.symlink_to(path)
                else:
                    target.mkdir()
            for name in names:
                path, target = Path(parent, name), self.place / inside / name
                num_files += 1
                if path in earlier:
                    continue
                if path.is_file() and path.stat().st_size <= _COPIED_BYTES:
                    shutil.copy2(path, target)
                else:
                    target.symlink_to(path)
        return sorted(str(path.relative_to(self.source)) for path in earlier)

    def _earlier_checkpoints(self) -> set[Path]:
        stamps = file_stamps(self.source)
        return {
            self.source / name
            for adapter in self.adapters
            # Any file of torch may also be data that the command needs.
            if adapter.name != "torch" or adapter.glob is not None
            for name, files in adapter.checkpoints(stamps).items()
            if adapter.is_complete(self.source, files)
        }

    def _mark_unread(self, names: Iterable[str]) -> list[Path]:
        """Set back the access times of files, to see later whether any of them was read.

        Returns:
            Links to them, which keep them if they are deleted; none where the file system does
            not record the first access after a change.
        """
        marks = self.root / "marks"
        shutil.rmtree(marks, ignore_errors=True)
        marks.mkdir()
        probe = marks / "probe"
        probe.write_text("probe")
        links = [probe]
        for name in names:
            links.append(marks / str(len(links)))
            os.link(self.place / name, links[-1])
        for link in links:
            os.utime(link, ns=(0, link.stat().st_mtime_ns))
        probe.read_text()
        return links[1:] if probe.stat().st_atime_ns else []

    def _keep(
        self,
        label: str,
        watch: CheckpointWatch,
        adapter: TrainerAdapter,
        earlier: Rows,
        problem: str = "",
    ) -> EndedRun:
        """Move the working directory away, and return the ended run."""
        run = self._run(
            watch, adapter, read_logs(self.place, watch.new_files(), self.place / f"{label}.log")
        )
        rows = {
            step: earlier.get(step, {}) | run.rows.get(step, {})
            for step in earlier.keys() | run.rows.keys()
        }
        kept = self.root / label
        shutil.rmtree(kept, ignore_errors=True)
        self.place.rename(kept)
        return replace(run, path=kept, rows=rows, problem=problem)

    def _run(self, watch: CheckpointWatch, adapter: TrainerAdapter, rows: Rows) -> EndedRun:
        return EndedRun(
            path=self.place,
            checkpoints=watch.complete(adapter)[0],
            rows=rows,
            has_steps=adapter.has_steps,
        )


def uses_paceline(command: Sequence[str], place: Path) -> bool:
    """Return whether a Python file of the command, relative to `place`, names Paceline."""
    files = [place / word for word in command if word.endswith(".py")]
    return any(path.is_file() and b"paceline" in path.read_bytes() for path in files)


def _too_late(num_checkpoints: int) -> NoVerdictError:
    return NoVerdictError(
        "nothing resumable",
        "The command must store a checkpoint well before its end, but it was at its end before a"
        f" kill could come between its checkpoints ({num_checkpoints} in all). Hint: store"
        " checkpoints more often, or let it run for longer.",
    )


@dataclass(slots=True)
class _Kill:
    """Condition of the kill: a number of checkpoints, and some time since the newest."""

    watch: CheckpointWatch
    adapter: TrainerAdapter
    number: int
    delay_s: float
    is_due: bool = False

    def __call__(self) -> bool:
        self.watch.look()
        seen = self.watch.versions.get(self.adapter.name, [])
        if len(seen) >= self.number and self.watch.seconds() - seen[-1][1] >= self.delay_s:
            # A kill while one is written would test whether checkpoints are stored safely.
            self.is_due = not self.watch.is_writing(self.adapter)
        return self.is_due
