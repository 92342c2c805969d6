"""`paceline verify-resume`: whether a script resumes exactly."""

import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._errors import report_error
from paceline.cli._options import Json

if TYPE_CHECKING:
    from paceline.testing import FaultOutcome, Verdict

_DIFFERENT, _NO_VERDICT = 1, 2
_SHOWN_DIFFERENCES = 10


def verify_resume(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The script and its arguments; after `--` all of them are the script's.",
            metavar="SCRIPT [ARGS]...",
        ),
    ],
    kill_at: Annotated[
        list[int],
        typer.Option(
            metavar="N",
            min=0,
            help="Kill the run by SIGKILL when N steps are completed; may be repeated. By default"
            " at a step about 60 % into it.",
        ),
    ] = [],  # noqa: B006
    preempt_at: Annotated[
        list[int],
        typer.Option(metavar="N", min=0, help="Preempt the run by SIGTERM then; may be repeated."),
    ] = [],  # noqa: B006
    pause_at: Annotated[
        list[int],
        typer.Option(
            metavar="N", min=0, help="Pause the run then, as a master does; may be repeated."
        ),
    ] = [],  # noqa: B006
    num_workers: Annotated[
        int,
        typer.Option(
            "--num-workers", "-n", metavar="W", min=1, help="Start the script with W workers."
        ),
    ] = 1,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="Turn on torch's deterministic switches, and name operations that have none.",
        ),
    ] = True,
    ignore: Annotated[
        list[str],
        typer.Option(
            metavar="PATTERN",
            help="Leave out differences whose `place:path` fits, such as"
            " 'metrics.training:seconds'; may be repeated.",
        ),
    ] = [],  # noqa: B006
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the runs there; by default they are deleted if all is exact.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long one start may take.")
    ] = 600.0,
    json: Json = False,
) -> None:
    """Tell whether a training ends in the same bits when it is interrupted and resumed.

    Runs the script straight, then with each interruption and on to the end, and compares the final
    checkpoints bit by bit and the reported metrics. Ends with 0 if all are the same, 1 if they
    differ, 2 if that could not be told.
    """
    from paceline.testing import Fault, VerificationError
    from paceline.testing import verify_resume as verify

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
            problem, _, output = str(error).partition("\n")
            report_error(problem)
            if output:
                typer.echo(output, err=True)
            _tell_place(place)
            raise typer.Exit(_NO_VERDICT) from None
    if json:
        _print_json(verdict)
    else:
        _print(verdict)
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


def _print(verdict: "Verdict") -> None:
    from paceline.cli._output import console, print_table

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
    from paceline.cli._output import print_json

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
