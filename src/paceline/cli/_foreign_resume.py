"""Options and output of `paceline verify-resume` for scripts that do not use Paceline."""

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from paceline.testing._verify_command import CommandVerdict

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


def uses_paceline(command: Sequence[str]) -> bool:
    """Return whether a Python file of the command names Paceline."""
    files = [Path(word) for word in command if word.endswith(".py")]
    return any(path.is_file() and b"paceline" in path.read_bytes() for path in files)


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
    from paceline.cli._console_output import print_json
    from paceline.testing._verify_command import verify_command

    try:
        words = None if resume_command is None else shlex.split(resume_command)
        verdict = verify_command(command, resume_command=words, directory=place, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if report is not None:
        report.write_text(json.dumps(verdict.as_json(), indent=2) + "\n")
    if is_json:
        print_json(verdict.as_json())
    else:
        _print_verdict(verdict)
    if verdict.is_exact and not is_kept:
        shutil.rmtree(place)
    else:
        typer.echo(f"The runs and what they wrote are in {place}.", err=True)
    raise typer.Exit(_EXIT_CODES[verdict.result])


def _print_verdict(verdict: "CommandVerdict") -> None:
    from rich.text import Text

    from paceline.cli._console_output import console

    style = _STYLES.get(verdict.result, "yellow")
    text = Text.assemble((verdict.result, style), f": {verdict.reason}")
    console().print(text, soft_wrap=True)
    if verdict.levels:
        words = {True: "equal", False: "different", None: "not judged"}
        levels = ", ".join(
            f"{level}: {words[is_equal]}" for level, is_equal in verdict.levels.items()
        )
        console().print(f"\nLevels: {levels}", soft_wrap=True)
    if verdict.resumed_checkpoint is not None:
        console().print(
            f"Resumed from {verdict.resumed_checkpoint}, step {_shown(verdict.resumed_from)};"
            f" killed at step {_shown(verdict.killed_at_step)}; adapter {verdict.adapter}",
            soft_wrap=True,
        )
    if verdict.differences:
        console().print("\nDifferences, the first one first:")
    for one in verdict.differences[:_SHOWN_DIFFERENCES]:
        rank = "" if one.rank is None else f", rank {one.rank}"
        console().print(f"  {one.kind}, step {_shown(one.step)}{rank}: {one}", soft_wrap=True)
    num_hidden = len(verdict.differences) - _SHOWN_DIFFERENCES
    if num_hidden > 0:
        console().print(f"  and {num_hidden} more")
    for note in verdict.notes:
        console().print(f"\nNote: {note}", soft_wrap=True)


def _shown(step: int | None) -> str:
    return "unknown" if step is None else str(step)
