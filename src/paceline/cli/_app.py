"""The `paceline` command: its groups of commands and the way it ends."""

import os
import sys
from typing import Annotated

import typer

from paceline.cli import (
    _backup_commands as _backup,
)
from paceline.cli import (
    _checkpoint_commands as _checkpoint,
)
from paceline.cli import (
    _examples_commands as _examples,
)
from paceline.cli import (
    _experiment_commands as _experiment,
)
from paceline.cli import (
    _home_commands as _home,
)
from paceline.cli import (
    _preview_search_command as _search,
)
from paceline.cli import (
    _runs_commands as _runs,
)
from paceline.cli import (
    _server,
    _slot,
    _token,
)
from paceline.cli import (
    _sync_command as _sync,
)
from paceline.cli import (
    _trial_commands as _trial,
)
from paceline.cli import (
    _user_commands as _user,
)
from paceline.cli import (
    _verify_resume_command as _verify,
)
from paceline.cli._connection import chosen_master
from paceline.cli._errors import is_user_error, report_error

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    rich_markup_mode=None,
    # Plain texts are quicker to read than Rich's tracebacks, and a pipe keeps them whole.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_INTERRUPTED = 130


def _print_version(value: bool) -> None:
    if value:
        version()
        raise typer.Exit


@app.callback()
def root(
    master: Annotated[
        str | None,
        typer.Option(
            "--master",
            "-m",
            metavar="URL",
            help="URL of the master. The default is $PACELINE_MASTER, or else the master that"
            " runs in $PACELINE_HOME.",
        ),
    ] = None,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train PyTorch models: metrics, checkpoints, exact resume, hyperparameter search."""
    del show_version
    chosen_master.set(master)


@app.command()
def version() -> None:
    """Print Paceline's version."""
    from importlib.metadata import version as installed_version

    typer.echo(installed_version("paceline"))


app.command("up")(_server.up)
app.command("down")(_server.down)
app.command("status")(_server.status)
app.command("backup")(_backup.backup)
app.command("restore")(_backup.restore)
app.command("login")(_user.login)
app.command("sync")(_sync.sync)
app.command("preview-search")(_search.preview_search)
# Options that it does not know are the script's.
app.command("verify-resume", context_settings={"ignore_unknown_options": True})(
    _verify.verify_resume
)
for _name, _short, _group in (
    ("experiment", "e", _experiment.app),
    ("trial", "t", _trial.app),
    ("checkpoint", "c", _checkpoint.app),
    ("slot", "s", _slot.app),
    ("runs", None, _runs.app),
    ("token", None, _token.app),
    ("user", None, _user.app),
    ("examples", None, _examples.app),
    ("home", None, _home.app),
):
    _help = str(_group.info.help).removesuffix(".")
    app.add_typer(_group, name=_name, help=f"{_help}{f' (short: {_short})' * bool(_short)}.")
    if _short:
        app.add_typer(_group, name=_short, hidden=True)


def main() -> None:
    """Run the command line and exit: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""
    # The HTTP client has a command line of its own, and would load all that this needs.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type] # not to be imported
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; Python's own flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if not is_user_error(error):
            raise
        report_error(str(error))
        sys.exit(1)
