"""Resume check of any trainer's command: run, kill, resume by its own means, and compare."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.testing._compare_runs import (
    DAMAGED,
    KINDS,
    STANDARD_KINDS,
    UNREADABLE,
    UNREADABLE_ASIDE,
    Difference,
    comparable_name,
    compare_checkpoints,
    difference_kind,
    state_rank,
    without_ignored,
)
from paceline.testing._script_runs import EndedRun, Script, checkpoint_step, loss_distance
from paceline.testing._trainer_adapters import (
    ADAPTERS,
    CommandRuns,
    NoVerdictError,
    Result,
    TrainerAdapter,
)

Level = Literal["strict", "standard", "relaxed"]

_CHECKPOINT, _RESUME, _METRIC = "checkpoint", "resume", "metric"
_STANDARD = STANDARD_KINDS | {_CHECKPOINT, _RESUME, DAMAGED, UNREADABLE}
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_ORDER = {kind: place for place, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandVerdict:
    """Result of `verify_command`: how a command resumes by its own means.

    Attributes:
        result: "exact" or "different" by the level asked for; "not supported" if the command does
            not resume or cannot be judged, "nothing resumable" if it stored no checkpoint in time,
            and "could not run" if it failed without any interruption.
        reason: The result in a sentence.
        level: The level asked for.
        levels: For each level whether the runs are equal; None if it cannot be judged.
        adapter: The name of the trainer's adapter; None if no checkpoint was found.
        num_checkpoints: The number of checkpoints of the straight run.
        resumed_checkpoint: The checkpoint that the resumed run started from.
        resumed_from: Its step; None if unknown.
        killed_at_step: The last step logged before the kill; None if unknown.
        diverged_at: The first step at which the runs differed before the kill; None if they did
            not. Then the command differs from run to run by itself.
        differences: The differences, the first one first.
        num_ranks: The number of ranks that stored a state of their own, at least 1.
        notes: Limits and explanations of the result, as sentences.
        directory: Where the runs were made.
    """

    result: Result
    reason: str
    level: Level
    directory: Path
    levels: Mapping[str, bool | None] = field(default_factory=dict)
    adapter: str | None = None
    num_checkpoints: int = 0
    resumed_checkpoint: str | None = None
    resumed_from: int | None = None
    killed_at_step: int | None = None
    diverged_at: int | None = None
    differences: tuple[Difference, ...] = ()
    num_ranks: int = 1
    notes: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the runs are equal by the level asked for."""
        return self.result == "exact"

    @property
    def first_difference(self) -> Difference | None:
        """First difference that counts at the level asked for; else the first one of all."""
        counted = [one for one in self.differences if _counts(one, self.level)]
        return next(iter(counted or self.differences), None)

    def __str__(self) -> str:
        return f"{self.result}: {self.reason}"

    def as_json(self) -> dict[str, Any]:
        """Return the report: the verdict, its differences, and a summary for each rank."""
        ranks = {}
        for rank in range(self.num_ranks):
            own = [one for one in self.differences if one.rank in (None, rank)]
            ranks[str(rank)] = {
                "num_differences": len(own),
                "first_difference": _as_json(own[0]) if own else None,
            }
        first = self.first_difference
        plain = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("differences", "directory", "levels", "num_ranks")
        }
        return {
            **plain,
            "levels": dict(self.levels),
            "first_difference": None if first is None else _as_json(first),
            "ranks": ranks,
            "differences": [_as_json(one) for one in self.differences],
            "directory": str(self.directory),
        }


def _as_json(one: Difference) -> dict[str, Any]:
    names = ("kind", "step", "rank", "place", "path", "detail")
    return {name: getattr(one, name) for name in names}


def _counts(one: Difference, level: Level) -> bool:
    kinds = {"standard": _STANDARD, "relaxed": {"loss", _RESUME}}
    return level == "strict" or one.kind in kinds[level]


def verify_command(
    command: Sequence[str],
    *,
    resume_command: Sequence[str] | None = None,
    checkpoints: str | None = None,
    adapter: str | None = None,
    level: Level = "strict",
    tolerance: float = 1e-3,
    allow_unpickling: bool = False,
    ignore: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    source: Path | None = None,
    timeout_s: float = 600.0,
) -> CommandVerdict:
    """Return whether a command of any trainer, killed and resumed, reaches the same bits.

    The command runs once to its end. Then it runs again, is killed with SIGKILL some steps after
    a checkpoint was complete, and is resumed by its own means. All starts have the same working
    directory, with copies of the small files of `source` and links to the others. The checkpoints
    and the logged losses are compared.

    Args:
        command: A script and its arguments, or a whole command line.
        resume_command: The command that resumes, with "{checkpoint}" for the checkpoint's path;
            the same command by default.
        checkpoints: A pattern for the paths of checkpoints, relative to the working directory.
        adapter: The name of a library's adapter: "transformers" (also for TRL), "dcp" (torchtitan),
            "accelerate", "lightning" or "torch"; by default the first one that finds a checkpoint.
        level: "strict" compares all bits, "standard" weights, optimizer, learning rates and logged
            losses, "relaxed" the logged losses within `tolerance`. Timings never count.
        tolerance: The largest relative distance of losses at level "relaxed".
        allow_unpickling: Read files that need full unpickling. This runs code in them.
        ignore: Patterns of `place:path` to leave out, such as "logs:output:loss".
        environment: Variables on top of this process's. All runs have the same OMP_NUM_THREADS.
        directory: Where the runs go; a new temporary directory by default.
        source: The directory with the files that the command needs; the current one by default.
        timeout_s: How long one start may take, in seconds.

    Raises:
        ValueError: A value is not allowed.
    """
    _check_options(command, checkpoints, adapter, level)
    root = Path(tempfile.mkdtemp(prefix="paceline-verify-")) if directory is None else directory
    adapters = tuple(one for one in ADAPTERS if adapter in (None, one.name))
    if checkpoints is not None:
        # A pattern of one's own; the named library still says when a checkpoint is complete.
        known = adapters[0] if adapter else TrainerAdapter(name="pattern")
        adapters = (replace(known, files=None, glob=checkpoints),)
    runs = CommandRuns(
        script=Script(
            command=tuple(command),
            num_workers=1,
            environment=_DETERMINISTIC | dict(environment or {}),
            links=None,
            timeout_s=timeout_s,
        ),
        resume_command=tuple(resume_command or command),
        adapters=adapters,
        source=(Path.cwd() if source is None else source).absolute(),
        root=root.absolute(),
        unpickle=allow_unpickling,
    )
    try:
        straight, resumed = runs.run_all()
        found = without_ignored(_compare(straight, resumed, unpickle=allow_unpickling), ignore)
        levels = _levels(found, loss_distance(straight.rows, resumed.rows), tolerance)
    except NoVerdictError as end:
        return CommandVerdict(
            result=end.result, reason=str(end), level=level, directory=root,
            notes=tuple(runs.notes), **runs.facts,
        )  # fmt: skip
    start = runs.facts["resumed_from"]
    steps = [one.step for one in found if one.place not in ("logs", "run") and one.step is not None]
    # Checkpoints of the steps before are those of the killed run.
    before = [runs.facts["diverged_at"], *(at for at in steps if start and at <= start)]
    facts = runs.facts | {"diverged_at": min((at for at in before if at is not None), default=None)}
    result, reason = _result(level, levels, found)
    if facts["diverged_at"] is not None and result == "different":
        reason = (
            f"The command differs from run to run by itself, at step {facts['diverged_at']} before"
            f" the kill. Hint: give it a seed, and deterministic operations. {reason}"
        )
    names = [name for files in straight.checkpoints.values() for name in files]
    return CommandVerdict(
        result=result,
        reason=reason,
        level=level,
        directory=root,
        levels=levels,
        differences=tuple(found),
        num_ranks=1 + max(state_rank(name) or 0 for name in names),
        notes=tuple(runs.notes),
        **facts,
    )


def _check_options(
    command: Sequence[str], checkpoints: str | None, adapter: str | None, level: str
) -> None:
    names = [one.name for one in ADAPTERS]
    if not command:
        raise ValueError("`command` must be a script with its arguments, but is empty.")
    if level not in get_args(Level):
        raise ValueError(f"`level` must be one of {', '.join(get_args(Level))}, but got {level!r}.")
    if adapter is not None and adapter not in names:
        raise ValueError(f"`adapter` must be one of {', '.join(names)}, but got {adapter!r}.")
    if checkpoints is not None and (
        not checkpoints or checkpoints.startswith(("/", "~")) or ".." in Path(checkpoints).parts
    ):
        raise ValueError(
            "`checkpoints` must be a pattern relative to the working directory, but got"
            f" {checkpoints!r}. Hint: each run has a working directory of its own, so that the"
            " command must write to a relative path."
        )


# ---- comparison ------------------------------------------------------------------------------


def _compare(straight: EndedRun, resumed: EndedRun, *, unpickle: bool) -> list[Difference]:
    """Return the differences of two runs, the earliest first."""
    if resumed.problem:
        detail = f"the resumed start failed: {resumed.problem}"
        return [Difference(place="run", path="", detail=detail, kind=_RESUME)]
    found = list(_compare_logs(straight, resumed))
    left = {comparable_name(name): name for name in straight.checkpoints}
    right = {comparable_name(name): name for name in resumed.checkpoints}
    for key in sorted(left.keys() | right.keys(), key=_natural_order):
        if key in left and key in right:
            step = straight.step(left[key], unpickle=unpickle)
            files = [run.files(names[key]) for run, names in ((straight, left), (resumed, right))]
            found += compare_checkpoints(key, files[0], files[1], step, unpickle=unpickle)
        else:
            having = "the straight run" if key in left else "the resumed one"
            detail = f"only {having} has this checkpoint"
            step = checkpoint_step(key) if straight.has_steps else None
            found.append(Difference(place=key, path="", detail=detail, kind=_CHECKPOINT, step=step))
    # A cause comes before its effects in the same step.
    last = max((one.step for one in found if one.step is not None), default=0)
    found.sort(
        key=lambda one: (last, 9) if one.step is None else (one.step, _ORDER.get(str(one.kind), 9))
    )
    return found


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key to sort checkpoint-20 before checkpoint-100."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _compare_logs(straight: EndedRun, resumed: EndedRun) -> Iterator[Difference]:
    steps = sorted(straight.rows.keys() & resumed.rows.keys())
    names = sorted({name for step in steps for name in straight.rows[step]})
    for name in names:
        pairs = [
            (step, straight.rows[step][name], resumed.rows[step][name])
            for step in steps
            if name in straight.rows[step] and name in resumed.rows[step]
        ]
        wrong = [one for one in pairs if repr(one[1]) != repr(one[2])]
        if wrong:
            step, left, right = wrong[0]
            detail = (
                f"{len(wrong)} of {len(pairs)} rows differ, the first at step {step}: {left!r} in"
                f" the straight run, {right!r} in the resumed one"
            )
            kind = difference_kind(name)
            kind = kind if kind in ("loss", "learning rate") else _METRIC
            yield Difference(place="logs", path=name, detail=detail, kind=kind, step=step)


def _levels(
    found: Sequence[Difference], distance: float | None, tolerance: float
) -> dict[str, bool | None]:
    levels: dict[str, bool | None] = {}
    for level in get_args(Level)[:2]:
        kinds = {one.kind for one in found if _counts(one, level)}
        is_open = bool(kinds) and kinds <= {UNREADABLE, UNREADABLE_ASIDE}
        levels[level] = None if is_open else not kinds
    has_failed = any(one.kind == _RESUME for one in found)
    levels["relaxed"] = None if distance is None else distance <= tolerance and not has_failed
    return levels


def _result(
    level: Level, levels: Mapping[str, bool | None], found: Sequence[Difference]
) -> tuple[Result, str]:
    if levels[level]:
        return "exact", f"The resumed run is equal to the straight run (level {level})."
    first = next((one for one in found if _counts(one, level)), None)
    if levels[level] is None:
        reason = "no losses were found in logs or output" if first is None else first.detail
        return "not supported", f"Level {level} cannot be judged: {reason}."
    if first is None:
        return "different", "The losses differ."
    at = "" if first.step is None else f" at step {first.step}"
    rank = "" if first.rank is None else f", rank {first.rank}"
    names: dict[str, str] = {"other": "other state", DAMAGED: "damaged files"}
    kind = names.get(first.kind or "", first.kind or "state")
    return "different", f"The first difference is in the {kind}{at}{rank}: {first}."
