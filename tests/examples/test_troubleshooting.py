"""Messages that the page explains are messages of the code."""

import ast
import re

import pytest
from guides import ROOT, Guide

PAGE = Guide("docs/troubleshooting.md")


def texts(source: str) -> list[str]:
    """Return the texts of a module; `…` stands for a value."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.mark.long
def test_every_message_is_one_of_the_code() -> None:
    files = (ROOT / "src" / "paceline").rglob("*.py")
    code = [text for file in files for text in texts(file.read_text())]
    messages = re.findall(r"^\| ``? ?(.*?…?.*?) ?``? \| ", PAGE.text, re.MULTILINE)
    assert len(messages) >= 30
    for message in messages:
        pattern = ".*".join(map(re.escape, message.split("…")))
        assert any(re.search(pattern, text, re.DOTALL) for text in code), message
