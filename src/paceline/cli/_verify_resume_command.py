"""Command `paceline verify-resume`: check whether a script resumes exactly."""

import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._console_output import console, print_json, print_table
from paceline.cli._options_and_errors import Json, report_error

if TYPE_CHECKING:
    from paceline.testing._verify_resume import FaultOutcome, Verdict

_DIFFERENT, _NO_VERDICT = 1, 2
_SHOWN_DIFFERENCES = 10


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
    json: Json = False,
) -> None:
    """Check whether a training resumes with the same bits.

    The script runs once without interruption. Then, for each interruption, it runs until the
    interruption and once more to the end. The command compares the final checkpoints bit by bit,
    and the reported metrics. The exit code is 0 if all are equal, 1 if they differ, and 2 if no
    comparison was possible.
    """
    from paceline.testing._compare_runs import VerificationError
    from paceline.testing._run_script import Fault
    from paceline.testing._verify_resume import verify_resume as verify

    if command[0].endswith(".py") and not Path(command[0]).is_file():
        raise typer.BadParameter(f"there is no file {command[0]!r}.", param_hint="SCRIPT")
    faults = [
        *(Fault("kill", step=step) for step in kill_at),
        *(Fault("preempt", step=step) for step in preempt_at),
        *(Fault("pause", step=step) for step in pause_at),
    ]
    place = _new_directory(directory)
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
            raise typer.Exit(_NO_VERDICT) from None
    if json:
        _print_json(verdict)
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

    print_table(
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
            console().print(f"\n{outcome.fault.kind} at step {outcome.hit_step}:")
        for difference in outcome.differences[:_SHOWN_DIFFERENCES]:
            console().print(f"  {difference}", soft_wrap=True)
        num_hidden = len(outcome.differences) - _SHOWN_DIFFERENCES
        if num_hidden > 0:
            console().print(f"  and {num_hidden} more")
    for note in verdict.notes:
        console().print(f"\nNote: {note}", soft_wrap=True)


def _result_text(outcome: "FaultOutcome") -> Any:
    from rich.text import Text

    if outcome.is_exact:
        return Text("the same bits", style="green")
    number = len(outcome.differences)
    return Text(f"{number} difference{'s' * (number > 1)}", style="red")


def _print_json(verdict: "Verdict") -> None:

    print_json(
        {
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
    )
