"""Resume check: runs with and without faults, their comparison, and a verdict."""

import fcntl
import json
import logging
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.testing._compare_runs import (
    Difference,
    FaultMissedError,
    NotResumableError,
    RunFacts,
    ScriptFailedError,
    compare_runs,
    find_run,
    first_difference_before,
    read_run_facts,
)
from paceline.testing._script_runs import (
    Script,
    ScriptEnd,
    num_threads,
    prepare_script_directory,
    start_script,
)

FaultKind = Literal["kill", "preempt", "pause"]

# A kill right behind a checkpoint would show little: lost steps must be trained again.
MIN_REPLAYED_STEPS = 3

_SIGNALS = {"kill": "KILL", "preempt": "TERM", "pause": "STOP"}
_BATCH_POINT, _REPORT = "engine.batch", "core.report"
# Time before a kill: enough for a checkpoint being stored in the background.
_BEFORE_KILL_S = 0.5
_GOOD_PART = 0.6


@dataclass(frozen=True, slots=True)
class Fault:
    """Interruption of a run, at a step or at a fault point.

    A step is a batch where Paceline trains, and for a script with its own loop one
    report of `steps_completed`. Without a step and a point a step is chosen that lies about 60 %
    into the run, for a kill at least three steps after a checkpoint.

    Attributes:
        kind: "kill" (SIGKILL), "preempt" (SIGTERM) or "pause" (the word of a master's runner).
        step: Interrupt when so many steps are completed.
        point: Interrupt at this point of `paceline.faults` instead.
        count: Interrupt when the point is reached for the `count`-th time.
        rank: The rank that it hits. By default a kill hits the last one, SIGTERM all of them; a
            pause is always the chief's.

    Raises:
        ValueError: A value is not allowed, or both `step` and `point` are given.
    """

    kind: FaultKind
    step: int | None = None
    point: str | None = None
    count: int = 1
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(
                f"`kind` must be one of {', '.join(get_args(FaultKind))}, but got {self.kind!r}."
            )
        if self.step is not None and self.point is not None:
            raise ValueError(
                "A fault must come at a step or at a point, but got"
                f" step={self.step} and point={self.point!r}."
            )
        for name, value, least in (("step", self.step, 0), ("count", self.count, 1)):
            if value is not None and value < least:
                raise ValueError(f"`{name}` must be at least {least}, but got {value}.")
        if self.kind == "pause" and self.rank:
            raise ValueError(f"A pause must be the chief's, but got rank={self.rank}.")

    def __str__(self) -> str:
        if self.point is not None:
            times = f":{self.count}" if self.count > 1 else ""
            return f"{self.kind} at {self.point}{times}"
        return f"{self.kind} at {'a step of choice' if self.step is None else f'step {self.step}'}"


def fault_variable(fault: Fault, straight: RunFacts, num_workers: int) -> str:
    """Return the value of `PACELINE_FAULT` for a fault.

    Raises:
        FaultMissedError: The straight run does not get there.
    """
    if fault.point is not None:
        return _fault_variable(fault, fault.point, fault.count, num_workers)
    step = _chosen_step(fault, straight) if fault.step is None else fault.step
    if step >= straight.steps_completed:
        raise FaultMissedError(
            f"The fault must come before the script ends, but step {step} is not below its"
            f" {straight.steps_completed} steps."
        )
    if _BATCH_POINT in straight.points:
        return _fault_variable(fault, _BATCH_POINT, step + 1, num_workers)
    count = next(
        (number for number, done in enumerate(straight.reported_steps, 1) if done >= step), None
    )
    if count is None:
        raise FaultMissedError(
            "A script with a loop of its own is interrupted at one of its reports, but none comes"
            f" at step {step} or later. Hint: report metrics at every step or every few."
        )
    return _fault_variable(fault, _REPORT, count, num_workers)


def _fault_variable(fault: Fault, point: str, count: int, num_workers: int) -> str:
    rank = fault.rank
    if rank is None and fault.kind == "kill" and point.startswith("engine."):
        rank = num_workers - 1
    if fault.kind == "pause":
        rank = 0
    text = f"{point}:{count},signal={_SIGNALS[fault.kind]}"
    if rank is not None:
        text += f",rank={rank}"
    if fault.kind == "kill" and fault.point is None:
        text += f",after={_BEFORE_KILL_S}"
    return text


def _chosen_step(fault: Fault, straight: RunFacts) -> int:
    """Return a step about 60 % into the run, with a meaningful result of a fault there."""
    wanted = max(1, round(straight.steps_completed * _GOOD_PART))
    if fault.kind != "kill":
        return min(wanted, straight.steps_completed - 1)
    stops = _possible_stops(straight)
    replayed = {stop: stop - _last(straight.checkpoint_steps, stop) for stop in stops}
    # The first checkpoint may still be in the making when the second one begins.
    first = straight.checkpoint_steps[min(1, len(straight.checkpoint_steps) - 1)]
    good = [stop for stop in stops if replayed[stop] >= MIN_REPLAYED_STEPS]
    for choice in ([stop for stop in good if stop > first], good):
        if choice:
            return min(choice, key=lambda stop: abs(stop - wanted))
    # Checkpoints are that close to each other: the best there is.
    return max(stops, key=lambda stop: (replayed[stop], -abs(stop - wanted)), default=wanted)


def _possible_stops(straight: RunFacts) -> Collection[int]:
    """Return the steps open to a fault, from the first checkpoint on."""
    end, first = straight.steps_completed, straight.checkpoint_steps[0]
    stops: Sequence[int] = (
        range(end) if _BATCH_POINT in straight.points else sorted(set(straight.reported_steps))
    )
    return [stop for stop in stops if first <= stop < end]


def _last(steps: Sequence[int], before: int) -> int:
    return max(step for step in steps if step <= before)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOutcome:
    """End of a run with an injected fault.

    Attributes:
        fault: The fault.
        hit_step: The steps that were completed when it came.
        resumed_from: The step of the checkpoint that the run resumed from.
        differences: The differences from the straight run; empty if every bit is equal.
        diverged_at: The first step at which the run differed before the fault came; None if it
            did not. Then the script differs from run to run by itself.
        threads: The number of torch's threads by rank.
        directory: Where the run was made: its run directory and its output.
    """

    fault: Fault
    hit_step: int
    resumed_from: int
    differences: tuple[Difference, ...]
    diverged_at: int | None
    threads: Mapping[int, int]
    directory: Path

    @property
    def is_exact(self) -> bool:
        """Whether the run ended with the same bits as the straight run."""
        return not self.differences

    @property
    def replayed_steps(self) -> int:
        """Number of steps lost and trained again."""
        return max(0, self.hit_step - self.resumed_from)

    @property
    def notes(self) -> tuple[str, ...]:
        """Limits and explanations of the result, as sentences."""
        notes = []
        if self.fault.kind == "kill" and self.replayed_steps < MIN_REPLAYED_STEPS:
            steps = "1 step" if self.replayed_steps == 1 else f"{self.replayed_steps} steps"
            notes.append(
                f"The kill came {steps} after a checkpoint, so that little had to be trained"
                f" again. Kill at least {MIN_REPLAYED_STEPS} steps after one."
            )
        if self.diverged_at is not None:
            notes.append(
                f"The run differed at step {self.diverged_at}, before the fault came: the script"
                " differs from run to run even without one. Give it a seed, and let it use no"
                " time, no set order and no operation that is not deterministic."
            )
        return tuple(notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of `verify_resume`: same bits with and without interruptions, or not.

    Attributes:
        steps_completed: The steps of the straight run.
        checkpoint_steps: The steps at which it stored checkpoints.
        outcomes: One per fault, in the order given.
        operations: Torch operations that said that they have no deterministic implementation.
        threads: The number of torch's threads by rank in the straight run.
        directory: Where the straight run was made.
    """

    steps_completed: int
    checkpoint_steps: tuple[int, ...]
    outcomes: tuple[FaultOutcome, ...]
    operations: tuple[str, ...]
    threads: Mapping[int, int]
    directory: Path

    @property
    def is_exact(self) -> bool:
        """Whether all interrupted runs ended with the same bits as the straight run."""
        return all(outcome.is_exact for outcome in self.outcomes)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences of all interrupted runs."""
        return tuple(one for outcome in self.outcomes for one in outcome.differences)

    @property
    def notes(self) -> tuple[str, ...]:
        """Limits and explanations of the results, as sentences."""
        notes = [f"{outcome.fault}: {note}" for outcome in self.outcomes for note in outcome.notes]
        if self.operations:
            notes.append(
                f"No deterministic implementation: {', '.join(self.operations)}. What they compute"
                " may differ from run to run."
            )
        for outcome in self.outcomes:
            if outcome.threads != self.threads:
                notes.append(
                    f"{outcome.fault}: the threads by rank were {dict(outcome.threads)}, but"
                    f" {dict(self.threads)} in the straight run; sums may differ by that."
                )
        return tuple(notes)


_DETERMINISTIC = {"PACELINE_DETERMINISTIC": "warn", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
OPERATION = re.compile(r"(\S+) does not have a deterministic implementation")
_FACTS = "straight.json"
_BATCH = "engine.batch"


def verify_resume(
    command: Sequence[str],
    *,
    faults: Sequence[Fault] = (),
    num_workers: int = 1,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    straight: Path | None = None,
    links: Path | None = None,
    deterministic: bool = True,
    ignore: Sequence[str] = (),
    timeout_s: float = 600.0,
) -> Verdict:
    """Return whether a script, interrupted and resumed, ends with the same bits.

    The script runs once without interruption. Then, for each fault, it runs until the fault and
    once more to the end. Each of these runs has its own directory. The final checkpoints are
    compared file by file, bit by bit. The metrics of all groups except "profiling" and "system" are
    compared row by row.

    Args:
        command: A script and its arguments, or a whole command line.
        faults: The faults that interrupt; one kill at a step of choice by default.
        num_workers: How many workers Paceline's launcher starts; one runs without it.
        environment: Variables on top of this process's. All runs have the same OMP_NUM_THREADS.
        directory: Where the runs go; a new temporary directory by default.
        straight: The directory of the straight run, for calls that share one: the first of them
            makes it there, others wait for it and use it. All must run the same in it.
        links: A directory whose entries every run finds in its own directory, for scripts that
            read files by relative paths.
        deterministic: Turn on torch's deterministic switches; an operation without a deterministic
            implementation then only warns, and is named in the verdict.
        ignore: Patterns of `place:path` to leave out, such as "metrics.training:seconds".
        timeout_s: How long one start may take, in seconds.

    Raises:
        ScriptFailedError: The straight run fails or takes too long.
        NotResumableError: The script does not use Paceline, or had stored no checkpoint in time.
        FaultMissedError: The script ended before a fault came.
        ValueError: `command` is empty, `num_workers` is below 1, or `straight` holds something
            else.
    """
    _check_command(command, num_workers)
    script = Script(
        command=tuple(command),
        num_workers=num_workers,
        environment={**(_DETERMINISTIC if deterministic else {}), **(environment or {})},
        links=links,
        timeout_s=timeout_s,
    )
    root = Path(tempfile.mkdtemp(prefix="paceline-verify-")) if directory is None else directory
    straight = straight or _unused(root, "straight")
    facts = _straight_facts(script, straight)
    outcomes = tuple(
        _run_interrupted(script, _unused(root, str(fault)), fault, facts, ignore)
        for fault in faults or [Fault("kill")]
    )
    return Verdict(
        steps_completed=facts.steps_completed,
        checkpoint_steps=tuple(facts.checkpoint_steps),
        outcomes=outcomes,
        operations=_operations_named_by_torch(
            [straight, *(outcome.directory for outcome in outcomes)]
        ),
        threads=facts.threads,
        directory=straight,
    )


def _check_command(command: Sequence[str], num_workers: int) -> None:
    if not command or num_workers < 1:
        raise ValueError(
            "`command` must be a script with its arguments and `num_workers` at least 1, but got"
            f" {list(command)} and {num_workers}."
        )


# ---- the straight run ------------------------------------------------------------------------


def _straight_facts(script: Script, directory: Path) -> RunFacts:
    """Return the facts of the straight run in a directory; run the script there if needed."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Tests in parallel share the straight run: the first one makes it.
    with directory.with_name(f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            _run_straight(script, directory)
    return _load_straight(directory, script)


def _run_straight(script: Script, directory: Path) -> None:
    logger.info("Running %s straight ...", " ".join(script.command))
    prepare_script_directory(script, directory)
    end = start_script(script, directory, "straight")
    if end.code != 0:
        raise ScriptFailedError(
            f"The script must end by itself without an error, but {_script_ending(end, script)}"
        )
    path = find_run(directory)
    if path is None:
        raise NotResumableError(
            "The script must use Paceline, but its straight run made no run directory. Hint: enter"
            " `paceline.core.init()` or `paceline.pytorch.init()`, and keep their default place"
            " for runs."
        )
    facts = read_run_facts(path)
    if facts.outcome != "completed":
        raise ScriptFailedError(
            "The script must complete its run, but it ended as"
            f" {facts.outcome or 'if it were killed'}. Hint: use the context as `with ... as`."
        )
    if facts.final_checkpoint is None:
        raise NotResumableError(
            "The script must store checkpoints to be resumed, but its straight run has stored none."
            " Hint: `checkpoint_period=` of `fit`, or `context.checkpoint.store_path`."
        )
    points = sorted({note["point"] for note in end.notes})
    content = {
        "command": list(script.command),
        "num_workers": script.num_workers,
        "run": path.name,
        "points": points,
        "threads": num_threads(end.notes),
    }
    (directory / _FACTS).write_text(json.dumps(content))


def _load_straight(directory: Path, script: Script) -> RunFacts:
    try:
        content: dict[str, Any] = json.loads((directory / _FACTS).read_text())
    except FileNotFoundError:
        raise ValueError(
            "`straight` must be the directory of a straight run that has completed, or not exist"
            f" yet, but {str(directory)!r} is none."
        ) from None
    made_with = (content["command"], content["num_workers"])
    if made_with != (list(script.command), script.num_workers):
        raise ValueError(
            f"`straight` must be a run of {list(script.command)} with {script.num_workers} workers,"
            f" but is one of {made_with[0]} with {made_with[1]}."
        )
    path = find_run(directory)
    assert path is not None
    threads = {int(rank): number for rank, number in content["threads"].items()}
    return read_run_facts(path, frozenset(content["points"]), threads)


# ---- an interrupted run ----------------------------------------------------------------------


def _run_interrupted(
    script: Script, directory: Path, fault: Fault, straight: RunFacts, ignore: Sequence[str]
) -> FaultOutcome:
    variable = fault_variable(fault, straight, script.num_workers)
    logger.info("Running it with a fault: %s ...", fault)
    prepare_script_directory(script, directory)
    first = start_script(script, directory, "interrupted", fault=variable)
    path = find_run(directory)
    if path is None or not first.hits:
        raise FaultMissedError(
            f"The fault must interrupt the script ({fault}), but it never came:"
            f" {_script_ending(first, script)}"
        )
    interrupted = read_run_facts(path)
    _check_interrupted(fault, interrupted, first, script)
    hit_step = _hit_step(first.hits[0], interrupted)
    if interrupted.final_checkpoint is None:
        raise NotResumableError(
            "A checkpoint must be stored before the fault comes, but there was none at step"
            f" {hit_step} ({fault}). Hint: let the fault come later, or store checkpoints earlier."
        )
    logger.info("Resuming it at step %d ...", interrupted.final_checkpoint.steps_completed)
    second = start_script(script, directory, "resumed", resume=path)
    resumed = read_run_facts(path)
    diverged_at = first_difference_before(straight, interrupted, hit_step)
    return FaultOutcome(
        fault=fault,
        hit_step=hit_step,
        resumed_from=interrupted.final_checkpoint.steps_completed,
        differences=tuple(_differences_after_resume(script, straight, resumed, second, ignore)),
        diverged_at=diverged_at,
        threads=num_threads(second.notes),
        directory=directory,
    )


def _check_interrupted(
    fault: Fault, interrupted: RunFacts, first: ScriptEnd, script: Script
) -> None:
    """Refuse a run not ended by the fault.

    Raises:
        FaultMissedError: The script continued to its end, or did not end at all.
    """
    is_left = interrupted.outcome == "preempted" and first.code == 0
    is_killed = interrupted.outcome not in ("completed", "preempted") and first.code
    if is_killed if fault.kind == "kill" else is_left:
        return
    said = {None: "without telling its end", "completed": "as completed"}.get(
        interrupted.outcome, f"as {interrupted.outcome}"
    )
    hint = (
        ""
        if fault.kind == "kill"
        else " Hint: ask `context.preempt.should_preempt()` often, and let the fault come earlier."
    )
    raise FaultMissedError(
        f"The fault must end the run ({fault}), but the run ended {said}:"
        f" {_script_ending(first, script, hint)}"
    )


def _hit_step(hit: Mapping[str, Any], interrupted: RunFacts) -> int:
    """Return the steps completed when a fault hit."""
    batches = hit["counts"].get(_BATCH)
    if batches is not None:
        # The point lies before the batch.
        return int(batches) - int(hit["point"] == _BATCH)
    reported = interrupted.attempts[0].reported_steps
    return reported[-1] if reported else 0


def _differences_after_resume(
    script: Script, straight: RunFacts, resumed: RunFacts, end: ScriptEnd, ignore: Sequence[str]
) -> list[Difference]:
    if end.code != 0:
        return [Difference(place="run", path="resumed", detail=_script_ending(end, script))]
    if resumed.outcome != "completed":
        detail = f"it ended as {resumed.outcome} instead of completed"
        return [Difference(place="run", path="resumed", detail=detail)]
    return compare_runs(straight, resumed, ignore)


# ---- small parts -----------------------------------------------------------------------------


def _script_ending(end: ScriptEnd, script: Script, hint: str = "") -> str:
    """Return a script's ending as a sentence, followed by its last output."""
    ending = (
        f"it took more than {script.timeout_s:g} s"
        if end.code is None
        else f"it ended with exit code {end.code}"
    )
    tail = end.tail()
    return f"{ending}.{hint}" + (f"\nThe end of {end.output}:\n{tail}" if tail else "")


def _operations_named_by_torch(directories: Sequence[Path]) -> tuple[str, ...]:
    """Return the operations named by torch in the outputs, without repetition."""
    found = {
        name
        for directory in directories
        for output in directory.glob("*.log")
        for name in OPERATION.findall(output.read_text(errors="replace"))
    }
    return tuple(sorted(found))


def _unused(root: Path, name: str) -> Path:
    stem = re.sub(r"[^a-z0-9.]+", "-", name)
    number, path = 1, root / stem
    while path.exists():
        number += 1
        path = root / f"{stem}-{number}"
    return path
