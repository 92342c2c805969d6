"""Models of the REST API on configurations and code of experiments."""

from typing import Any

from pydantic import Field

from paceline.messages.base import Message, Request


class ConfigView(Message):
    """An experiment's configuration: as submitted, if it was a text, and as resolved."""

    submitted: str | None
    resolved: dict[str, Any]
    resolved_yaml: str


class CodeFile(Message):
    """A file of an experiment's code; `size` is in bytes."""

    path: str
    size: int


class ConfigText(Request):
    """A configuration as YAML, to be checked."""

    text: str = Field(max_length=1_000_000)


class ConfigProblem(Message):
    """What is wrong at a place of a configuration; lines count from 1."""

    path: str
    message: str
    line: int | None = None


class CheckedConfig(Message):
    """The configuration in a text, and what is wrong with it; both may be none."""

    config: dict[str, Any] | None
    problems: list[ConfigProblem]
    warnings: list[str] = []
