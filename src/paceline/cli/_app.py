"""The `paceline` command: its groups of commands and the way it ends."""

import os
import sys
from typing import Annotated

import typer

from paceline._terminal_text import TerminalStream
from paceline.cli import (
    _backup_commands,
    _checkpoint_commands,
    _examples_commands,
    _experiment_commands,
    _home_commands,
    _master_commands,
    _pool_commands,
    _preview_search_command,
    _queue_commands,
    _runner_commands,
    _runs_commands,
    _slot_commands,
    _sync_command,
    _token_commands,
    _trial_commands,
    _user_commands,
    _verify_resume_command,
)
from paceline.cli._command_options import CaFile
from paceline.cli._connection import chosen_master, trust
from paceline.cli._errors import is_cli_user_error, report_error
from paceline.cli._restart_without_token import is_paceline_command

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


app.command("up")(_master_commands.up)
app.command("down")(_master_commands.down)
app.command("status")(_master_commands.status)
app.command("backup")(_backup_commands.backup)
app.command("restore")(_backup_commands.restore)
app.command("login")(_user_commands.login)
app.command("sync")(_sync_command.sync)
app.command("preview-search")(_preview_search_command.preview_search)
# Options that it does not know are the script's.
app.command("verify-resume", context_settings={"ignore_unknown_options": True})(
    _verify_resume_command.verify_resume
)
for _name, _short, _group in (
    ("experiment", "e", _experiment_commands.app),
    ("trial", "t", _trial_commands.app),
    ("checkpoint", "c", _checkpoint_commands.app),
    ("slot", "s", _slot_commands.app),
    ("runner", None, _runner_commands.app),
    ("pool", None, _pool_commands.app),
    ("job", None, _queue_commands.app),
    ("runs", None, _runs_commands.app),
    ("token", None, _token_commands.app),
    ("user", None, _user_commands.app),
    ("examples", None, _examples_commands.app),
    ("home", None, _home_commands.app),
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
