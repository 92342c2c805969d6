"""Links of all pages lead somewhere, and the commands that they show exist."""

import re
import shlex
from typing import Any

import pytest
import typer
from guides import ROOT, Guide

from paceline.cli import app
from paceline.launch._launcher_arguments import parse_arguments

PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
# The others tell of earlier times, too.
GUIDES = [page for page in PAGES if not page.startswith(("CHANGELOG", "docs/decisions"))]
ROOT_COMMAND: Any = typer.main.get_command(app)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    assert Guide(page).dead_links() == []


def unknown_word(line: str) -> str | None:
    """Return the first command or option of a line that does not exist."""
    command, words = ROOT_COMMAND, shlex.split(line, comments=True)[1:]
    while words:
        word = words.pop(0)
        if word.startswith("-"):
            name, is_assigned, _ = word.partition("=")
            options = {name: each for each in command.params for name in each.opts}
            if command.context_settings.get("ignore_unknown_options") or name in ("-h", "--help"):
                return None
            if name not in options:
                return word
            if not options[name].is_flag and not is_assigned:
                words = words[1:]
        elif word in ("COMMAND", "..."):
            return None
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return word
            command = command.commands[word]
    return None


@pytest.mark.parametrize("page", GUIDES)
def test_commands_and_their_options_exist(page: str) -> None:
    for line in Guide(page).commands("paceline"):
        assert unknown_word(line) is None, line


@pytest.mark.parametrize("page", GUIDES)
def test_options_of_launchers_exist(page: str) -> None:
    for line in Guide(page).commands(r"python3? -m paceline\.launch\.\w+"):
        words = shlex.split(re.sub(r" \.\.\.$", "", line))[3:]
        if words:
            parse_arguments(words)


def test_unknown_words_are_found() -> None:
    assert unknown_word("paceline e create config.yaml --fast") == "--fast"
    assert unknown_word("paceline experiment make") == "make"
