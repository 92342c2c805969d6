"""The commands there are, what loads with them, and what wrong usage looks like."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.main import get_command
from typer.models import OptionInfo

from paceline.cli import app
from paceline.cli._commands.doctor_and_home_commands import backup
from paceline.cli._errors import CommandError

COMMANDS = {
    "audit": [],
    "backup": [],
    "checkpoint": ["delete", "describe", "download", "export", "list"],
    "doctor": [],
    "down": [],
    "examples": ["copy", "list"],
    "experiment": [
        "activate",
        "archive",
        "cancel",
        "compare",
        "continue",
        "create",
        "delete",
        "describe",
        "diff",
        "download",
        "fork",
        "kill",
        "label",
        "list",
        "list-checkpoints",
        "list-trials",
        "logs",
        "metrics",
        "move",
        "note",
        "pause",
        "propose",
        "rename",
        "repeat",
        "set",
        "set-max-slots",
        "set-priority",
        "set-weight",
        "tree",
        "unarchive",
        "wait",
    ],
    "export": [],
    "home": ["check"],
    "import": [],
    "init": [],
    "job": ["list", "move"],
    "login": [],
    "mcp": [],
    "model": ["alias", "delete", "describe", "download", "list", "register"],
    "notebook": [],
    "notify": ["list", "test"],
    "open": [],
    "policy": ["delete", "list", "set", "show"],
    "pool": ["list", "reset", "set"],
    "preview-search": [],
    "project": ["create", "delete", "list", "members"],
    "quota": ["delete", "list", "set"],
    "restore": [],
    "run": [],
    "runner": ["drain", "forget", "list", "release", "reserve", "resume"],
    "runs": ["compare", "delete", "download", "files", "list", "prune", "show", "time"],
    "shell": [],
    "simulate-search": [],
    "slot": ["drain", "list", "resume"],
    "status": [],
    "storage": ["list"],
    "sync": [],
    "tensorboard": [],
    "template": ["delete", "list", "set", "show"],
    "token": ["create", "list", "renew-home", "revoke"],
    "trial": [
        *("continue", "describe", "download", "download-files", "files", "kill", "list"),
        *("logs", "metrics", "stop", "time"),
    ],
    "up": [],
    "usage": [],
    "user": ["add", "group", "link", "list", "remove", "role", "set-password"],
    "verify-resume": [],
    "version": [],
}
ALIASES = {"e": "experiment", "t": "trial", "c": "checkpoint", "s": "slot"}


def test_the_commands_are_those_listed_here() -> None:
    root = get_command(app)
    shown = {
        name: sorted(n for n, c in getattr(command, "commands", {}).items() if not c.hidden)
        for name, command in root.commands.items()  # type: ignore[attr-defined]
        if not command.hidden
    }
    assert shown == COMMANDS


def test_short_names_lead_to_the_same_commands() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for alias, name in ALIASES.items():
        assert commands[alias].commands.keys() == commands[name].commands.keys()
    assert {"lt", "lc"} <= commands["e"].commands.keys()


def test_every_command_and_option_has_a_help_text() -> None:
    root = get_command(app)
    for name, group in root.commands.items():  # type: ignore[attr-defined]
        for command in [group, *getattr(group, "commands", {}).values()]:
            assert command.help, (name, command.name)
            for parameter in command.params:
                assert getattr(parameter, "help", None), (name, command.name, parameter.name)


def commands_below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from commands_below(f"{name} {word}", below)


def declared_options(function: Any) -> Iterator[str]:
    """Yield the options that the annotations of a command's function declare."""
    for argument, hint in get_type_hints(function, include_extras=True).items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, OptionInfo):
                # Typer takes the first name for a default value until it builds the command.
                names = [info.default, *(info.param_decls or ())]
                named = [name for name in names if str(name).startswith("-")]
                yield from named or [f"--{argument.replace('_', '-')}"]


def test_every_declared_option_is_accepted() -> None:
    """Some releases of Typer lose options, as 0.27 does `--port PORT`."""
    lost, seen = [], 0
    for name, command in commands_below("paceline", get_command(app)):
        accepted = [o for p in command.params for o in (*p.opts, *p.secondary_opts)]
        for declared in declared_options(command.callback) if command.callback else ():
            seen += 1
            lost += [f"{name} {o}" for o in declared.split("/") if o not in accepted]
    assert seen > 200
    assert lost == []


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
sys.argv = ["paceline", "--help"]
from paceline.cli import main
try:
    main()
except SystemExit as exit:
    assert not exit.code
heavy = {"torch", "numpy", "pydantic", "fastapi", "httpx2", "sqlalchemy", "uvicorn", "yaml"}
print("LOADED", sorted(heavy & sys.modules.keys()))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert result.stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize(
    "arguments",
    [["e", "describe", "one"], ["e", "unknown"], ["up", "--port", "70000"], ["t", "logs"]],
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "paceline.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_an_interval_of_backups_without_follow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="`--every` must come with `--follow`"):
        backup(tmp_path, every=5.0, home=tmp_path)
