"""Problems of a config: one per field, all reported together."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pydantic_core import PydanticCustomError

from paceline._errors import PicklableError

_LONGEST_VALUE = 120


class _Missing(Enum):
    NOTHING = "nothing"

    def __repr__(self) -> str:
        return self.value


MISSING: Final = _Missing.NOTHING
"""The value of a problem about a field that is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with a config.

    `path` is dotted from the top of the config (`searcher.max_trials`), `value` is what stands
    there (`MISSING` when nothing does), `message` continues a sentence that starts with the path,
    `allowed` says what may stand there and `hint` what to do; both may be empty. The text of a
    problem leaves out `allowed` where the message says it already.
    """

    path: str
    value: object
    message: str
    allowed: str = ""
    hint: str = ""

    @property
    def value_text(self) -> str:
        """Return the value as one short line of JSON."""
        if self.value is MISSING:
            return "nothing"
        try:
            text = json.dumps(self.value, ensure_ascii=False, default=repr, skipkeys=True)
        except (ValueError, RecursionError):
            # A value that contains itself, or an integer of thousands of digits.
            text = f"a value of type {type(self.value).__name__}"
        return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."

    def __str__(self) -> str:
        subject = f"`{self.path}` " if self.path else "The config "
        sentences = [f"{subject}{self.message}, got {self.value_text}."]
        if self.allowed and self.allowed not in self.message:
            sentences.append(f"Allowed: {self.allowed}.")
        if self.hint:
            sentences.append(f"Hint: {self.hint}")
        return " ".join(" ".join(sentences).splitlines())


class ConfigError(PicklableError, ValueError):
    """Raised when a config is not valid; its text has one line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def refused(
    message: str, allowed: str = "", *, hint: str = "", is_missing: bool = False
) -> PydanticCustomError:
    """Return the error that a validator raises to refuse the value of its own field."""
    context: dict[str, object] = {"message": message, "allowed": allowed, "hint": hint}
    if is_missing:
        context["value"] = MISSING
    return PydanticCustomError("refused", "{message}", context)


def refused_parts(problems: Iterable[Problem]) -> PydanticCustomError:
    """Return the error for problems inside a value; their paths start at the field."""
    return PydanticCustomError("refused_parts", "several problems", {"problems": list(problems)})


def join_path(*parts: str | int) -> str:
    """Join names with dots and positions in brackets."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part:
            path += f".{part}" if path and not part.startswith("[") else part
    return path
