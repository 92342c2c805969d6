"""The `paceline` command: its groups of commands and the way it ends."""

import os
import sys
from typing import Annotated

import typer

from paceline._terminal_text import TerminalStream
from paceline.cli._backup_commands import backup, restore
from paceline.cli._checkpoint_commands import app as checkpoint_app
from paceline.cli._command_options import CaFile
from paceline.cli._connection import chosen_master, trust
from paceline.cli._errors import is_cli_user_error, report_error
from paceline.cli._examples_commands import app as examples_app
from paceline.cli._experiment_commands import app as experiment_app
from paceline.cli._home_commands import app as home_app
from paceline.cli._master_commands import down, status, up
from paceline.cli._pool_commands import app as pool_app
from paceline.cli._preview_search_command import preview_search
from paceline.cli._queue_commands import app as queue_app
from paceline.cli._restart_without_token import is_paceline_command
from paceline.cli._runner_commands import app as runner_app
from paceline.cli._runs_commands import app as runs_app
from paceline.cli._slot_commands import app as slot_app
from paceline.cli._sync_command import sync
from paceline.cli._token_commands import app as token_app
from paceline.cli._trial_commands import app as trial_app
from paceline.cli._user_commands import app as user_app
from paceline.cli._user_commands import login
from paceline.cli._verify_resume_command import verify_resume

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
    ca_file: CaFile = None,
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
    if ca_file is not None:
        trust(ca_file)


@app.command()
def version() -> None:
    """Print Paceline's version."""
    from importlib.metadata import version as installed_version

    typer.echo(installed_version("paceline"))


app.command("up")(up)
app.command("down")(down)
app.command("status")(status)
app.command("backup")(backup)
app.command("restore")(restore)
app.command("login")(login)
app.command("sync")(sync)
app.command("preview-search")(preview_search)
# Options that it does not know are the script's.
app.command("verify-resume", context_settings={"ignore_unknown_options": True})(verify_resume)
for _name, _short, _group in (
    ("experiment", "e", experiment_app),
    ("trial", "t", trial_app),
    ("checkpoint", "c", checkpoint_app),
    ("slot", "s", slot_app),
    ("runner", None, runner_app),
    ("pool", None, pool_app),
    ("job", None, queue_app),
    ("runs", None, runs_app),
    ("token", None, token_app),
    ("user", None, user_app),
    ("examples", None, examples_app),
    ("home", None, home_app),
):
    _help = str(_group.info.help).removesuffix(".")
    app.add_typer(_group, name=_name, help=f"{_help}{f' (short: {_short})' * bool(_short)}.")
    if _short:
        app.add_typer(_group, name=_short, hidden=True)


def main() -> None:
    """Run the command line and exit: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""
    # The HTTP client has a command line of its own, and would load all that this needs.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type] # not to be imported
    is_paceline_command.set(True)
    sys.stdout, sys.stderr = TerminalStream(sys.stdout), TerminalStream(sys.stderr)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; Python's own flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if not is_cli_user_error(error):
            raise
        report_error(str(error))
        sys.exit(1)
