"""The restart of a command that has a token in its environment."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from paceline.cli._connection import is_paceline_command, restart_without_token

COMMAND = ["python", "-X", "utf8", "-m", "paceline.cli", "up", "--slots", "2"]


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], bool]]:
    """Return a list of restarts, each with whether the token was still in the environment."""
    made: list[tuple[str, list[str], bool]] = []

    def restart(path: str, arguments: list[str]) -> None:
        made.append((path, arguments, "PACELINE_TOKEN" in os.environ))

    monkeypatch.setattr(os, "execv", restart)
    return made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that calls the restart as a process with such a command line would."""

    def call(
        is_command: bool = True, token: str | None = "secret", called_with: Any = COMMAND[5:]
    ) -> None:
        monkeypatch.setattr(sys, "orig_argv", COMMAND)
        monkeypatch.setattr(sys, "argv", ["/lib/paceline/cli/__main__.py", *called_with])
        if token is not None:
            monkeypatch.setenv("PACELINE_TOKEN", token)
        reset = is_paceline_command.set(is_command)
        restart_without_token()
        is_paceline_command.reset(reset)

    return call


def test_it_is_restarted_with_all_its_arguments_and_without_the_token(
    run: Callable[..., None], restarts: list[Any]
) -> None:
    run()
    assert restarts == [(sys.executable, [sys.executable, *COMMAND[1:]], False)]


@pytest.mark.parametrize(
    "changed",
    [
        {"token": None},
        # A program that calls the function of the command, or with arguments of its own.
        {"is_command": False},
        {"called_with": ["up", "--slots", "3"]},
    ],
)
def test_nothing_else_is_restarted(
    run: Callable[..., None], restarts: list[Any], changed: dict[str, Any]
) -> None:
    run(**changed)
    assert restarts == []
