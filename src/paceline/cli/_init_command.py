"""Command `paceline init`: a small project for a front door, ready to run."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli._console_output import print_answer
from paceline.cli._options_and_errors import CommandError

Door = Literal["core", "trial", "function", "creators", "declarative"]

_IGNORED = "paceline_runs/\n__pycache__/\n"


def init(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Directory of the project: new, or without files. The default is this one.",
            metavar="DIR",
        ),
    ] = Path(),
    door: Annotated[
        Door,
        typer.Option(
            help="core: a loop of your own. trial: a class with model, data and training step."
            " function: your loop on workers. creators: functions that make model, data and"
            " optimizer. declarative: a YAML file."
        ),
    ] = "core",
) -> None:
    """Make a small project that runs as it stands.

    Nothing is overwritten. The directory may have files whose names begin with a dot, such as .git
    and .venv.
    """
    from paceline.cli._app import examples_directory

    _check_free(directory)
    source = examples_directory() / "starters" / door
    # An installer compiles the starters into a directory beside them.
    paths = sorted(path for path in source.iterdir() if path.is_file())
    files = {path.name: path.read_text("utf-8") for path in paths}
    if not (directory / ".gitignore").exists():
        files[".gitignore"] = _IGNORED
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        # A file that came meanwhile is kept.
        with open(directory / name, "x", encoding="utf-8") as file:
            file.write(text)
    main = "run.yaml" if "run.yaml" in files else "train.py"
    enter = "" if directory.resolve() == Path.cwd() else f"cd {directory} && "
    print_answer(
        {"directory": str(directory), "door": door, "files": list(files), "main": main},
        f"Made a project in {directory}: {', '.join(files)}.\n"
        f"Start it with: {enter}paceline run {main}",
    )


def _check_free(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise CommandError(f"`DIR` must be a directory, but {str(directory)!r} is a file.")
    taken = sorted(path.name for path in directory.glob("*") if not path.name.startswith("."))
    if taken:
        more = f" and {len(taken) - 3} more" if len(taken) > 3 else ""
        raise CommandError(
            f"`DIR` must be new or without files, but {str(directory)!r} has"
            f" {', '.join(taken[:3])}{more}. Hint: name another directory: `paceline init NAME`."
        )
