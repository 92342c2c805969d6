"""`paceline examples`: list and copy the examples of Paceline."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli._errors import CommandError

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List and copy the examples of Paceline."
)

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.py[co]", "paceline_runs", "checkpoints")


@app.command("list")
def list_examples() -> None:
    """List the examples."""
    for name in _names():
        typer.echo(name)


@app.command("copy")
def copy_example(
    name: Annotated[
        str, typer.Argument(help="Name of the example, see `examples list`.", metavar="NAME")
    ],
    directory: Annotated[
        Path | None, typer.Argument(help="New directory. The default is ./NAME.", metavar="DIR")
    ] = None,
) -> None:
    """Copy an example into a new directory."""
    if name not in _names():
        raise CommandError(
            f"`NAME` must be one of {', '.join(_names()) or 'no examples'}, but got {name!r}."
        )
    target = directory or Path(name)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CommandError(
            f"`DIR` must be a new or empty directory, but {str(target)!r} is not."
            " Hint: give another one as the second argument."
        )
    shutil.copytree(examples_directory() / name, target, ignore=_LEFT_OUT, dirs_exist_ok=True)
    typer.echo(f"Copied {name} to {target}. Read {target / 'README.md'} first.")


def examples_directory() -> Path:
    """Return where the examples lie: in the package, or in the checkout of an editable install.

    Raises:
        CommandError: They are in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for place in (package / "_examples", package.parents[1] / "examples"):
        if place.is_dir():
            return place
    raise CommandError(
        f"The examples must lie in {str(package / '_examples')!r}, but do not."
        " Hint: install Paceline again."
    )


def _names() -> list[str]:
    return sorted(p.name for p in examples_directory().iterdir() if (p / "README.md").is_file())
