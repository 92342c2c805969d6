"""Command `paceline verify-resume`: check whether a script or a command resumes exactly."""

import json
import logging
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import _console_output as console
from paceline.cli._errors import report_error
from paceline.cli._options import Json

if TYPE_CHECKING:
    from paceline.testing._verify_command import CommandVerdict
    from paceline.testing._verify_resume import FaultOutcome, Verdict

_EXIT_CODES = {
    "exact": 0,
    "different": 1,
    "could not run": 2,
    "not supported": 3,
    "nothing resumable": 4,
}
_STYLES = {"exact": "green", "different": "red"}
_SHOWN_DIFFERENCES = 10

Adapter = Annotated[
    Literal["paceline", "transformers", "dcp", "accelerate", "lightning", "torch"] | None,
    typer.Option(
        help="Library of the script. The default is found by its checkpoints. TRL is transformers,"
        " torchtitan is dcp."
    ),
]
Checkpoints = Annotated[
    str | None,
    typer.Option(
        metavar="GLOB", help="Paths of the checkpoints, relative to the current directory."
    ),
]
ResumeCommand = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="Command that resumes; {checkpoint} stands for the path. The default is the same"
        " command.",
    ),
]
VerifyLevel = Annotated[
    Literal["strict", "standard", "relaxed"],
    typer.Option(
        help="strict: all bits. standard: weights, optimizer, learning rates and losses. relaxed:"
        " losses within --tolerance. For scripts without Paceline."
    ),
]
Tolerance = Annotated[
    float,
    typer.Option(metavar="X", min=0, help="Relative distance of losses with --level relaxed."),
]
AllowUnpickling = Annotated[
    bool,
    typer.Option(
        "--allow-unpickling",
        help="Read checkpoints that need full unpickling. This runs code in them.",
    ),
]
Report = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a report as JSON, with each rank.")
]


def verify_foreign_command(
    command: Sequence[str],
    place: Path,
    *,
    is_kept: bool,
    is_json: bool,
    report: Path | None,
    resume_command: str | None,
    **options: Any,
) -> None:
    """Verify a command, print the verdict, and exit with its code."""
    from paceline.testing._verify_command import verify_command

    try:
        words = None if resume_command is None else shlex.split(resume_command)
        verdict = verify_command(command, resume_command=words, directory=place, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if report is not None:
        report.write_text(json.dumps(verdict.as_json(), indent=2) + "\n")
    if is_json:
        console.print_json(verdict.as_json())
    else:
        _print_command_verdict(verdict)
    if verdict.is_exact and not is_kept:
        shutil.rmtree(place)
    else:
        typer.echo(f"The runs and what they wrote are in {place}.", err=True)
    raise typer.Exit(_EXIT_CODES[verdict.result])


def _print_command_verdict(verdict: "CommandVerdict") -> None:
    from rich.text import Text

    style = _STYLES.get(verdict.result, "yellow")
    text = Text.assemble((verdict.result, style), f": {verdict.reason}")
    console.stdout().print(text, soft_wrap=True)
    if verdict.levels:
        words = {True: "equal", False: "different", None: "not judged"}
        levels = ", ".join(
            f"{level}: {words[is_equal]}" for level, is_equal in verdict.levels.items()
        )
        console.stdout().print(f"\nLevels: {levels}", soft_wrap=True)
    if verdict.resumed_checkpoint is not None:
        console.stdout().print(
            f"Resumed from {verdict.resumed_checkpoint}, step {_shown(verdict.resumed_from)};"
            f" killed at step {_shown(verdict.killed_at_step)}; adapter {verdict.adapter}",
            soft_wrap=True,
        )
    if verdict.differences:
        console.stdout().print("\nDifferences, the first one first:")
    for one in verdict.differences[:_SHOWN_DIFFERENCES]:
        rank = "" if one.rank is None else f", rank {one.rank}"
        console.stdout().print(
            f"  {one.kind}, step {_shown(one.step)}{rank}: {one}", soft_wrap=True
        )
    num_hidden = len(verdict.differences) - _SHOWN_DIFFERENCES
    if num_hidden > 0:
        console.stdout().print(f"  and {num_hidden} more")
    for note in verdict.notes:
        console.stdout().print(f"\nNote: {note}", soft_wrap=True)


def _shown(step: int | None) -> str:
    return "unknown" if step is None else str(step)


_DIFFERENT, _NO_VERDICT, _NOTHING = 1, 2, 4


def verify_resume(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The script and its arguments. After `--`, all arguments go to the script.",
            metavar="SCRIPT [ARGS]...",
        ),
    ],
    kill_at: Annotated[
        list[int],
        typer.Option(
            metavar="N",
            min=0,
            help="Kill the run with SIGKILL after N completed steps. Repeatable. Without"
            " --kill-at, --preempt-at and --pause-at, the run is killed once, after about 60 %.",
        ),
    ] = [],  # noqa: B006
    preempt_at: Annotated[
        list[int],
        typer.Option(
            metavar="N", min=0, help="Preempt the run with SIGTERM after N steps. Repeatable."
        ),
    ] = [],  # noqa: B006
    pause_at: Annotated[
        list[int],
        typer.Option(
            metavar="N", min=0, help="Pause the run after N steps, as a master does. Repeatable."
        ),
    ] = [],  # noqa: B006
    num_workers: Annotated[
        int,
        typer.Option(
            "--num-workers", "-n", metavar="W", min=1, help="Number of workers of the script."
        ),
    ] = 1,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="Turn on torch's deterministic mode, and name operations without a deterministic"
            " implementation.",
        ),
    ] = True,
    ignore: Annotated[
        list[str],
        typer.Option(
            metavar="PATTERN",
            help="Ignore differences whose `place:path` matches PATTERN, such as"
            " 'metrics.training:seconds'. Repeatable.",
        ),
    ] = [],  # noqa: B006
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the runs in DIR. By default they are deleted if all bits are equal.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time limit of each start.")
    ] = 600.0,
    adapter: Adapter = None,
    checkpoints: Checkpoints = None,
    resume_command: ResumeCommand = None,
    level: VerifyLevel = "strict",
    tolerance: Tolerance = 1e-3,
    allow_unpickling: AllowUnpickling = False,
    report: Report = None,
    json: Json = False,
) -> None:
    """Check whether a training resumes with the same bits.

    The script runs once without interruption. Then, for each interruption, it runs until the
    interruption and once more to the end. The command compares the checkpoints bit by bit, and
    the metrics.

    A script without Paceline (Transformers, TRL, Lightning, Accelerate, torchtitan, plain torch) is
    killed once, after about half of its checkpoints, and resumes by its own means: the same
    command again, or --resume-command. Its checkpoints are those of its library, or --checkpoints.

    Exit codes: 0 equal, 1 different, 2 it could not run, 3 not supported (it does not resume, or
    its files cannot be judged), 4 nothing resumable (no checkpoint in time).
    """
    from paceline.testing._compare_runs import NotResumableError, VerificationError
    from paceline.testing._trainer_adapters import uses_paceline
    from paceline.testing._verify_resume import Fault
    from paceline.testing._verify_resume import verify_resume as verify

    if command[0].endswith(".py") and not Path(command[0]).is_file():
        raise typer.BadParameter(f"there is no file {command[0]!r}.", param_hint="SCRIPT")
    faults = [
        *(Fault("kill", step=step) for step in kill_at),
        *(Fault("preempt", step=step) for step in preempt_at),
        *(Fault("pause", step=step) for step in pause_at),
    ]
    place = _new_directory(directory)
    foreign = partial(
        verify_foreign_command,
        command,
        place,
        is_kept=directory is not None,
        is_json=json,
        report=report,
        adapter=None if adapter == "paceline" else adapter,
        checkpoints=checkpoints,
        resume_command=resume_command,
        level=level,
        tolerance=tolerance,
        allow_unpickling=allow_unpickling,
        ignore=ignore,
        timeout_s=timeout,
    )
    has_own_way = adapter not in (None, "paceline") or checkpoints or resume_command
    if has_own_way or not (adapter or faults or num_workers > 1 or uses_paceline(command, Path())):
        with _progress_on_stderr():
            foreign()
        return
    with _progress_on_stderr():
        try:
            verdict = verify(
                command,
                faults=faults,
                num_workers=num_workers,
                directory=place,
                links=Path.cwd(),
                deterministic=deterministic,
                ignore=ignore,
                timeout_s=timeout,
            )
        except VerificationError as error:
            _tell_problem(str(error))
            _tell_place(place)
            code = _NOTHING if isinstance(error, NotResumableError) else _NO_VERDICT
            raise typer.Exit(code) from None
    if report is not None:
        report.write_text(dumps(_as_json(verdict), indent=2) + "\n")
    if json:
        console.print_json(_as_json(verdict))
    else:
        _print_verdict(verdict)
    if verdict.is_exact and directory is None:
        shutil.rmtree(place)
    else:
        _tell_place(place)
    if not verdict.is_exact:
        raise typer.Exit(_DIFFERENT)


def _new_directory(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="paceline-verify-"))
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _tell_problem(text: str) -> None:
    problem, _, output = text.partition("\n")
    report_error(problem)
    if output:
        typer.echo(output, err=True)


def _tell_place(place: Path) -> None:
    typer.echo(f"The runs and what they wrote are in {place}.", err=True)


@contextmanager
def _progress_on_stderr() -> Iterator[None]:
    logger = logging.getLogger("paceline.testing")
    handler = logging.StreamHandler(sys.stderr)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _print_verdict(verdict: "Verdict") -> None:

    console.print_table(
        ["Fault", "Came at step", "Resumed from", "Trained again", "Result"],
        [
            (
                outcome.fault.kind,
                outcome.hit_step,
                outcome.resumed_from,
                outcome.replayed_steps,
                _result_text(outcome),
            )
            for outcome in verdict.outcomes
        ],
        right=["Came at step", "Resumed from", "Trained again"],
    )
    for outcome in verdict.outcomes:
        if outcome.differences:
            console.stdout().print(f"\n{outcome.fault.kind} at step {outcome.hit_step}:")
        for difference in outcome.differences[:_SHOWN_DIFFERENCES]:
            console.stdout().print(f"  {difference}", soft_wrap=True)
        num_hidden = len(outcome.differences) - _SHOWN_DIFFERENCES
        if num_hidden > 0:
            console.stdout().print(f"  and {num_hidden} more")
    for note in verdict.notes:
        console.stdout().print(f"\nNote: {note}", soft_wrap=True)


def _result_text(outcome: "FaultOutcome") -> Any:
    from rich.text import Text

    if outcome.is_exact:
        return Text("the same bits", style="green")
    number = len(outcome.differences)
    return Text(f"{number} difference{'s' * (number > 1)}", style="red")


def _as_json(verdict: "Verdict") -> dict[str, Any]:
    return {
        "is_exact": verdict.is_exact,
        "steps_completed": verdict.steps_completed,
        "checkpoint_steps": list(verdict.checkpoint_steps),
        "threads": {str(rank): number for rank, number in verdict.threads.items()},
        "operations": list(verdict.operations),
        "notes": list(verdict.notes),
        "faults": [
            {
                "kind": outcome.fault.kind,
                "hit_step": outcome.hit_step,
                "resumed_from": outcome.resumed_from,
                "replayed_steps": outcome.replayed_steps,
                "differences": [
                    {"place": one.place, "path": one.path, "detail": one.detail}
                    for one in outcome.differences
                ],
            }
            for outcome in verdict.outcomes
        ],
        "directory": str(verdict.directory.parent),
    }
