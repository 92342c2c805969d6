"""The `environment` section: variables, secrets, the interpreter, and the command's prefix."""

import re
from dataclasses import replace
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from paceline.config._config_problems import Problem, join_path, refused, refused_parts
from paceline.config._config_secrets import HIDDEN
from paceline.config._section_base import (
    AbsolutePath,
    Section,
    text_field,
)

_VARIABLE_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
# The runner hands this one to the attempt's processes; any other value would cut them off.
_OWN_VARIABLE = "PACELINE_RUN_DIR"
# Kinds of devices, for each of which the predecessor takes other variables.
_DEVICES = ("cpu", "cuda", "rocm")


def _check_python(value: str) -> str:
    is_command = value.strip() == value != "" and "/" not in value
    if "\0" in value or not (is_command or value.startswith("/")):
        raise refused(
            "must be an interpreter that does not depend on a directory",
            "an absolute path, or a command name such as `python3.11`",
        )
    return value


def _check_prefix(value: list[str]) -> list[str]:
    problems = [
        Problem(path=f"[{index}]", value=item, message="must not have a null character")
        for index, item in enumerate(value)
        if "\0" in item
    ]
    if problems:
        raise refused_parts(problems)
    if value and not value[0].strip():
        raise refused("must name a program first", "a list such as [nice, -n, '10']")
    return value


def _read_secrets(value: Any) -> Any:
    """Read secrets as variables are read; what is wrong is told without their values."""
    try:
        return _read_variables(value)
    except PydanticCustomError as error:
        found = (error.context or {}).get("problems", ())
        problems = [replace(problem, value=HIDDEN) for problem in found]
        message, allowed = "must be a map or a list", "a map NAME: value, or a list of NAME=value"
        whole = Problem(path="", value=HIDDEN, message=message, allowed=allowed)
        raise refused_parts(problems or [whole]) from None


def _read_variables(value: Any) -> Any:
    if not isinstance(value, list | dict):
        raise refused("must be a map or a list", "a map NAME: value, or a list of NAME=value")
    problems: list[Problem] = []
    variables: dict[str, str] = {}
    for path, name, text in _variable_items(value, problems):
        problem = _variable_problem(path, name, text)
        if problem is None and name in variables:
            problem = Problem(path=path, value=text, message=f"must not give `{name}` twice")
        if problem is not None:
            problems.append(problem)
        else:
            variables[name] = text
    if problems:
        raise refused_parts(problems)
    return variables


def _variable_items(
    value: list[Any] | dict[Any, Any], problems: list[Problem]
) -> list[tuple[str, Any, Any]]:
    if isinstance(value, dict):
        return [(join_path(str(name)), name, text) for name, text in value.items()]
    items: list[tuple[str, Any, Any]] = []
    for index, entry in enumerate(value):
        path = join_path(index)
        if isinstance(entry, str) and "=" in entry:
            name, _, text = entry.partition("=")
            items.append((path, name, text))
        else:
            message = "must give a variable and its value"
            problems.append(
                Problem(path=path, value=entry, message=message, allowed="a string NAME=value")
            )
    return items


def _variable_problem(path: str, name: Any, text: Any) -> Problem | None:
    if not isinstance(name, str) or not _VARIABLE_NAME.match(name):
        message, allowed = "must be named as a variable", "letters, digits and _, no digit first"
        return Problem(path=path, value=name, message=message, allowed=allowed)
    if name in _DEVICES and isinstance(text, dict | list):
        message, hint = (
            "must be a string: variables are not divided by kinds of devices",
            f"move the variables of {name!r} one level up.",
        )
        return Problem(path=path, value=text, message=message, allowed="a string", hint=hint)
    if not isinstance(text, str) or "\0" in text:
        message, hint = "must be a string", "put the value in quotes."
        return Problem(path=path, value=text, message=message, allowed="a string", hint=hint)
    if name == _OWN_VARIABLE:
        message = "is set by Paceline itself and must be left out"
        return Problem(path=path, value=text, message=message)
    return None


_VARIABLES_SCHEMA = {
    "anyOf": [
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "array", "items": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*="}},
    ]
}


_SECRETS_SCHEMA = {
    "anyOf": [
        {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        {"type": "array", "items": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*(=|$)"}},
    ]
}


class Environment(Section):
    """Where and with what the entrypoint runs."""

    python: Annotated[str, text_field(_check_python)] | None = Field(
        default=None,
        description="Interpreter that comes first on PATH: an absolute path or a command name; "
        "null is the master's own.",
    )
    prefix: Annotated[list[str], AfterValidator(_check_prefix)] = Field(
        default=[],
        description="Program and arguments that the command of the entrypoint is appended to.",
    )
    variables: Annotated[
        dict[str, str], BeforeValidator(_read_variables), WithJsonSchema(_VARIABLES_SCHEMA)
    ] = Field(
        default={},
        validation_alias=AliasChoices("variables", "environment_variables"),
        description="Environment variables, as a map or as a list of NAME=value.",
    )
    secrets: Annotated[
        dict[str, str], BeforeValidator(_read_secrets), WithJsonSchema(_SECRETS_SCHEMA)
    ] = Field(
        default={},
        repr=False,
        description="Environment variables that are never shown; one without a value is taken from"
        " the environment of whoever submits.",
    )
    working_dir: AbsolutePath | None = Field(
        default=None,
        description="Absolute path to run in; null is a private copy of the submitted directory.",
    )
    uv: bool = Field(
        default=False,
        description="Install what `uv.lock` names into the copy of the submitted directory, by"
        " `uv sync --frozen`, and run in that environment.",
    )

    @field_validator("uv")
    @classmethod
    def _check_uv(cls, value: bool, info: ValidationInfo) -> bool:
        if value:
            for name, why in (
                ("working_dir", "which is no copy of the code"),
                ("prefix", "which may lead to another file system"),
            ):
                if info.data.get(name):
                    raise refused(f"must not be given with `environment.{name}`, {why}", "false")
        return value

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        twice = sorted(value.keys() & info.data.get("variables", {}).keys())
        if twice:
            message = "must not be given in `environment.variables` as well"
            raise refused_parts(
                [Problem(path=name, value=HIDDEN, message=message) for name in twice]
            )
        return value
