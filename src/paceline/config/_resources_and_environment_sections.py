"""The small sections: resources, reproducibility, environment and profiling."""

import re
from dataclasses import replace
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from paceline.config._config_problems import Problem, join_path, refused, refused_parts
from paceline.config._config_secrets import HIDDEN
from paceline.config._section_base import (
    AbsolutePath,
    Count,
    NonNegative,
    PositiveSeconds,
    Section,
    text_field,
)

_VARIABLE_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
# The runner hands this one to the attempt's processes; any other value would cut them off.
_OWN_VARIABLE = "PACELINE_RUN_DIR"


class SlotRange(Section):
    """How many slots an elastic trial may run on; each of its attempts gets as many as are free."""

    min: Count = Field(description="The fewest slots that a trial can run on.")
    max: Count = Field(description="The most slots that a trial can use.")

    @field_validator("max")
    @classmethod
    def _check_max(cls, value: int, info: ValidationInfo) -> int:
        least = info.data.get("min")
        if least is not None and value < least:
            raise refused("must be at least `min`", f"an integer >= {least}")
        return value


def _kind_of_slots(value: Any) -> str:
    return "range" if isinstance(value, (dict, SlotRange)) else "number"


class Resources(Section):
    """How many slots trials and the experiment may hold."""

    slots_per_trial: Annotated[
        Annotated[Count, Tag("number")] | Annotated[SlotRange, Tag("range")],
        Discriminator(_kind_of_slots),
    ] = Field(
        default=1,
        description="Slots that each trial runs on, or the fewest and the most as `min` and `max`.",
    )
    max_slots: Count | None = Field(
        default=None,
        description="Slots that all trials of the experiment may hold at once; null is no limit.",
    )

    pool: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None,
        validation_alias=AliasChoices("pool", "resource_pool"),
        description="Pool of nodes that the trials run on; null is the pool `default`.",
    )
    priority: Annotated[int, Field(ge=1, le=99)] | None = Field(
        default=None,
        description="Priority in pools with the policy `priority`: 1 is the most important one, 99 "
        "the least; null is 42.",
    )
    weight: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] = Field(
        default=1.0,
        description="Share of the experiment in pools with the policy `fair_share`, in relation to "
        "the weights of others.",
    )
    allow_uneven: bool = Field(
        default=False,
        description="Whether a trial on several nodes may have more slots on one than on another.",
    )
    start_timeout: PositiveSeconds = Field(
        default=300.0,
        description="Seconds in which all nodes of a trial must have begun; otherwise it gives its "
        "slots back and is tried again later.",
    )

    @property
    def fewest_slots(self) -> int:
        """The fewest slots that a trial can run on."""
        given = self.slots_per_trial
        return given.min if isinstance(given, SlotRange) else given

    @property
    def most_slots(self) -> int:
        """The most slots that a trial can use."""
        given = self.slots_per_trial
        return given.max if isinstance(given, SlotRange) else given

    @field_validator("max_slots")
    @classmethod
    def _check_max_slots(cls, value: int | None, info: ValidationInfo) -> int | None:
        per_trial = info.data.get("slots_per_trial")
        least = per_trial.min if isinstance(per_trial, SlotRange) else per_trial
        if value is not None and least is not None and value < least:
            raise refused(
                "must be at least `resources.slots_per_trial`, or no trial could ever start",
                f"an integer >= {least}",
            )
        return value


class Reproducibility(Section):
    """What a search repeats when it is run again."""

    experiment_seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None,
        description="Seed of the search, from which each trial's seed is drawn; "
        "null draws one at submission.",
    )


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


class Profiling(Section):
    """Which part of the training is profiled."""

    enabled: bool = Field(
        default=False, description="Record the times of the parts of each step on each rank."
    )
    begin_on_batch: NonNegative = Field(default=0, description="First batch that is profiled.")
    end_after_batch: NonNegative | None = Field(
        default=None, description="Last batch that is profiled; null is the end of the training."
    )
    sync_timings: bool = Field(
        default=True,
        description="Measure the work of the GPU; otherwise the launch of the work.",
    )

    @field_validator("end_after_batch")
    @classmethod
    def _check_end(cls, value: int | None, info: ValidationInfo) -> int | None:
        begin = info.data.get("begin_on_batch")
        if value is not None and begin is not None and value < begin:
            raise refused(
                "must not lie before `profiling.begin_on_batch`", f"an integer >= {begin}"
            )
        return value
