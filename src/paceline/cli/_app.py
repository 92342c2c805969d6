"""Command `paceline`: groups of commands, `examples`, and exit codes with error output."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline._base.terminal_text import TerminalStream
from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._command_groups import CommandGroup, PipeClosedError
from paceline.cli._commands import edit_and_compare_commands, file_commands  # noqa: F401 - their imports add commands
from paceline.cli._commands.checkpoint_commands import checkpoint_app
from paceline.cli._commands.create_command import init, preview_search, simulate_search
from paceline.cli._commands.doctor_and_home_commands import backup, doctor, home_app, restore
from paceline.cli._commands.experiment_commands import experiment_app
from paceline.cli._commands.export_commands import export_runs, import_store
from paceline.cli._commands.interactive_commands import notebook, open_task, shell, tensorboard
from paceline.cli._commands.master_commands import down, status, up
from paceline.cli._commands.mcp_command import mcp
from paceline.cli._commands.model_commands import model_app
from paceline.cli._commands.rule_commands import policy_app, storage_app, template_app
from paceline.cli._commands.run_command import run
from paceline.cli._commands.runner_and_pool_commands import pool_app, runner_app
from paceline.cli._commands.runs_commands import runs_app, sync
from paceline.cli._commands.slot_queue_and_quota_commands import (
    notify_app,
    queue_app,
    quota_app,
    slot_app,
)
from paceline.cli._commands.trial_commands import trial_app
from paceline.cli._commands.user_and_token_commands import (
    audit,
    login,
    project_app,
    token_app,
    usage,
    user_app,
)
from paceline.cli._commands.verify_resume_command import verify_resume
from paceline.cli._connection import chosen_master, is_paceline_command, trust
from paceline.cli._errors import CommandError, error_code, is_cli_user_error, report_error

examples_app = CommandGroup(help="List and copy the examples of Paceline.")

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.py[co]", "paceline_runs", "checkpoints")


@examples_app.command("list", is_list=True)
def list_examples() -> None:
    """List the examples."""

    names = _names()
    console.print_list([{"name": name} for name in names], ["Name"], [[name] for name in names])


@examples_app.command("copy")
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

    console.print_answer(
        {"name": name, "path": str(target)},
        f"Copied {name} to {target}. Read {target / 'README.md'} first.",
    )


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


app = CommandGroup(
    name="paceline",
    # Plain texts are quicker to read than Rich's tracebacks, and a pipe keeps them whole.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# 128 + SIGINT and 128 + SIGPIPE, as shells report them.
_INTERRUPTED, _PIPE_CLOSED = 130, 141


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
    ca_file: options.CaFile = None,
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


# In the order of the help. Options that `run` and `verify-resume` do not know are the script's.
app.command("init")(init)
app.command("run", context_settings={"ignore_unknown_options": True})(run)
app.command("verify-resume", context_settings={"ignore_unknown_options": True})(verify_resume)
app.command("doctor", is_list=True)(doctor)
app.command("up")(up)
app.command("status")(status)
app.command("login")(login)
app.command("down")(down)
app.command("preview-search")(preview_search)
app.command("simulate-search")(simulate_search)
app.command("notebook")(notebook)
app.command("shell")(shell)
app.command("tensorboard")(tensorboard)
app.command("open")(open_task)
app.command("sync")(sync)
app.command("import")(import_store)
app.command("export")(export_runs)
app.command("backup")(backup)
app.command("restore")(restore)
app.command("audit", is_list=True)(audit)
app.command("usage", is_list=True)(usage)
app.command("mcp")(mcp)


@app.command()
def version() -> None:
    """Print Paceline's version."""
    from importlib.metadata import version as installed_version

    number = installed_version("paceline")
    console.print_answer({"version": number}, number)


for _name, _short, _group in (
    ("runs", None, runs_app),
    ("examples", None, examples_app),
    ("experiment", "e", experiment_app),
    ("trial", "t", trial_app),
    ("checkpoint", "c", checkpoint_app),
    ("model", None, model_app),
    ("job", None, queue_app),
    ("slot", "s", slot_app),
    ("runner", None, runner_app),
    ("pool", None, pool_app),
    ("notify", None, notify_app),
    ("token", None, token_app),
    ("user", None, user_app),
    ("project", None, project_app),
    ("template", None, template_app),
    ("policy", None, policy_app),
    ("quota", None, quota_app),
    ("storage", None, storage_app),
    ("home", None, home_app),
):
    _help = str(_group.info.help).removesuffix(".")
    app.add_typer(_group, name=_name, help=f"{_help}{f' (short: {_short})' * bool(_short)}.")
    if _short:
        app.add_typer(_group, name=_short, hidden=True)


def main() -> None:
    """Run the command line and exit: 0 success, 1 failure, 2 wrong usage, 130 interrupted.

    The exit code is 141 if the reader of the output has closed its pipe.
    """
    is_paceline_command.set(True)
    sys.stdout, sys.stderr = TerminalStream(sys.stdout), TerminalStream(sys.stderr)
    if re.search(r" (--json|--format[ =]json|--fields[ =]\S*) ", f" {' '.join(sys.argv)} "):
        # Errors before the command, too, are for a program.
        options.output_format.set("json")
    try:
        code = app(prog_name="paceline", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except (BrokenPipeError, PipeClosedError):
        # The reader, such as `head`, has seen enough; Python's own flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _PIPE_CLOSED
    except Exception as error:
        code = _report(error)
    sys.exit(code)


def _report(error: Any) -> int:
    """Report an error that the user can fix, and return the exit code; raise any other error."""
    if isinstance(error, typer.Abort):
        report_error("The command was not confirmed.", "aborted")
    elif is_cli_user_error(error):
        report_error(str(error), error_code(error))
    elif not hasattr(error, "format_message"):
        raise error
    elif options.is_json():
        context = getattr(error, "ctx", None)
        hint = f" Hint: see `{context.command_path} --help`." if context else ""
        report_error(f"{error.format_message()}{hint}", "usage")
        return int(error.exit_code)
    else:
        error.show()
        return int(error.exit_code)
    return 1
