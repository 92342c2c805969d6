"""Sections `environment` and `notify`, and the secrets of a config."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from paceline.config import _fields_and_problems as fields
from paceline.config._read_yaml import compose_yaml

HIDDEN = "***"
_SECRETS = ("secrets",)
_VARIABLES = ("variables", "environment_variables")
HIDDEN_FIELDS = frozenset((*_SECRETS, *_VARIABLES))
"""Fields of `environment` that may hold secrets."""
_WORDS = frozenset(
    {
        "APIKEY", "AUTH", "AUTHORIZATION", "COOKIE", "CREDENTIAL", "CREDENTIALS", "KEY", "KEYS",
        "PASS", "PASSPHRASE", "PASSWD", "PASSWORD", "PASSWORDS", "PAT", "PWD", "SECRET",
        "SECRETS", "TOKEN",
    }
)  # fmt: skip
_ENDINGS = ("APIKEY", "PASSWORD", "PASSWD", "SECRET", "TOKEN")
# A shorter text stands in others by chance.
_SHORTEST_FOUND = 6
_DIRECTORIES = frozenset({"PWD", "OLDPWD"})
_URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def is_secret(name: str, value: object) -> bool:
    """Return whether a variable looks like a secret, by its name or as a URL with a password."""
    words = name.upper().split("_")
    looks_so = not _WORDS.isdisjoint(words) or words[-1].endswith(_ENDINGS)
    if looks_so and name.upper() not in _DIRECTORIES:
        return True
    return isinstance(value, str) and _URL_WITH_PASSWORD.search(value) is not None


def hide_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config for display: secrets, and variables looking like secrets, are `***`."""
    environment = config.get("environment")
    if not isinstance(environment, dict):
        return config
    hidden = dict(environment)
    for field in (*_SECRETS, *_VARIABLES):
        if field in hidden:
            hidden[field] = _hide_secrets_in(hidden[field], is_all=field in _SECRETS)
    return {**config, "environment": hidden}


def without_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config to be stored: the values of `environment.secrets` are `***`."""
    stored = copy.deepcopy(config)
    stored["environment"]["secrets"] = dict.fromkeys(stored["environment"]["secrets"], HIDDEN)
    return stored


def reveal_secrets(
    config: dict[str, Any], variables: Mapping[str, str], secrets: Mapping[str, str]
) -> dict[str, Any]:
    """Return a resolved config with each `***` replaced by its hidden value.

    Args:
        config: The resolved config.
        variables: Values of the variables of the experiment that it was made from.
        secrets: Values of that experiment's secrets.

    Raises:
        ConfigError: There is no such value.
    """
    environment = dict(config["environment"])
    problems = []
    for field, known in (("secrets", secrets), ("variables", variables)):
        values = environment[field]
        taken = {
            name
            for name, value in values.items()
            if value == HIDDEN and (field in _SECRETS or is_secret(name, known.get(name)))
        }
        problems += [
            fields.Problem(
                path=fields.join_path("environment", field, name),
                value=HIDDEN,
                message="must have its value",
                hint="`***` stands for a value that is not shown; fork or continue the experiment"
                " that has it, or give the value.",
            )
            for name in sorted(taken - known.keys())
        ]
        environment[field] = values | {name: known[name] for name in taken & known.keys()}
    if problems:
        raise fields.ConfigError(problems)
    return {**config, "environment": environment}


def fill_secrets(data: dict[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return plain data with a value for each secret given by name only.

    A secret is named as an entry `NAME` of a list, or as `NAME: null` in a map.

    Args:
        data: The config as plain data.
        variables: Where the values are: the environment of whoever submits.

    Raises:
        ConfigError: A variable is not set.
    """
    environment = data.get("environment") if isinstance(data, dict) else None
    if not isinstance(environment, dict):
        return data
    given = environment.get("secrets")
    filled: Any
    if isinstance(given, dict):
        named = [name for name, value in given.items() if value is None]
        filled = given | {name: variables.get(name) for name in named}
    elif isinstance(given, list):
        named = [entry for entry in given if isinstance(entry, str) and "=" not in entry]
        filled = [f"{e}={variables.get(e)}" if e in named else e for e in given]
    else:
        return data
    missing = [name for name in named if name not in variables]
    if missing:
        raise fields.ConfigError(
            fields.Problem(
                path=fields.join_path("environment", "secrets", str(name)),
                value=fields.MISSING,
                message="must be a variable of your environment, as the config gives no value",
                hint=f"`export {name}=...` before you submit.",
            )
            for name in missing
        )
    return {**data, "environment": {**environment, "secrets": filled}}


def hide_in_text(text: str, values: Iterable[str] = ()) -> str | None:
    """Return the text of a config with its secrets as `***`; None if the text is no YAML.

    Values of `environment.secrets`, and of variables that look like a secret, are replaced. All
    else stays as it is, comments included.

    Args:
        text: A submitted text.
        values: Further texts to be replaced wherever they stand.
    """
    try:
        root = compose_yaml(text)
    except fields.ConfigError:
        return None
    shown, end = [], 0
    # An aliased node stands there twice: spans within hidden ones are skipped.
    for start, stop, hidden in sorted(set(_secret_spans(root))):
        if start >= end:
            shown += [text[end:start], f'"{hidden}"', "\n" * text[start:stop].endswith("\n")]
            end = stop
    return hide_values("".join([*shown, text[end:]]), values)


def hide_values(text: str, values: Iterable[str]) -> str:
    """Return a text with the values of secrets as `***`, except values too short to be certain."""
    for value in values:
        if len(value) >= _SHORTEST_FOUND:
            text = text.replace(value, HIDDEN)
    return text


def _hide_secrets_in(values: Any, *, is_all: bool) -> Any:
    if isinstance(values, dict):
        return {
            name: HIDDEN if is_all or is_secret(str(name), value) else value
            for name, value in values.items()
        }
    if isinstance(values, list):
        return [_hide_entry(entry, is_all=is_all) for entry in values]
    return HIDDEN if is_all and values is not None else values


def _hide_entry(entry: Any, *, is_all: bool) -> Any:
    if not isinstance(entry, str) or "=" not in entry:
        return entry
    name, _, value = entry.partition("=")
    return f"{name}={HIDDEN}" if is_all or is_secret(name, value) else entry


def _secret_spans(root: yaml.Node | None) -> Iterator[tuple[int, int, str]]:
    """Yield the start and end of each secret value in the text, and the text replacing them."""
    for node, hidden in _secret_nodes(root):
        yield node.start_mark.index, node.end_mark.index, hidden


def _secret_nodes(root: yaml.Node | None) -> Iterator[tuple[yaml.Node, str]]:
    for field, section in _fields_with_secrets(_child(root, "environment")):
        is_all = field in _SECRETS
        if not is_all and field not in _VARIABLES:
            continue
        if isinstance(section, yaml.SequenceNode):
            for entry in section.value:
                name, separator, value = str(entry.value).partition("=")
                if separator and (is_all or is_secret(name, value)):
                    yield entry, f"{name}={HIDDEN}"
        for name, value_node in _fields_with_secrets(section):
            if is_all or is_secret(name, value_node.value):
                yield value_node, HIDDEN


def _child(node: yaml.Node | None, name: str) -> yaml.Node | None:
    return dict(_fields_with_secrets(node)).get(name)


def _fields_with_secrets(node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    """Yield the fields of a map, including the fields merged by `<<`."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if key.tag.endswith(":merge"):
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for part in parts:
                yield from _fields_with_secrets(part)
        else:
            yield str(key.value), value


_VARIABLE_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
# The runner hands this one to the attempt's processes; any other value would cut them off.
_OWN_VARIABLE = "PACELINE_RUN_DIR"
# Kinds of devices, for each of which the predecessor takes other variables.
_DEVICES = ("cpu", "cuda", "rocm")


def _check_python(value: str) -> str:
    is_command = value.strip() == value != "" and "/" not in value
    if "\0" in value or not (is_command or value.startswith("/")):
        raise fields.refused(
            "must be an interpreter that does not depend on a directory",
            "an absolute path, or a command name such as `python3.11`",
        )
    return value


def _check_prefix(value: list[str]) -> list[str]:
    problems = [
        fields.Problem(path=f"[{index}]", value=item, message="must not have a null character")
        for index, item in enumerate(value)
        if "\0" in item
    ]
    if problems:
        raise fields.refused_parts(problems)
    if value and not value[0].strip():
        raise fields.refused("must name a program first", "a list such as [nice, -n, '10']")
    return value


def _read_secrets(value: Any) -> Any:
    """Read secrets in the form of variables; problems are reported without the values."""
    try:
        return _read_variables(value)
    except PydanticCustomError as error:
        found = (error.context or {}).get("problems", ())
        problems = [replace(problem, value=HIDDEN) for problem in found]
        message, allowed = "must be a map or a list", "a map NAME: value, or a list of NAME=value"
        whole = fields.Problem(path="", value=HIDDEN, message=message, allowed=allowed)
        # The cause would show the values.
        raise fields.refused_parts(problems or [whole]) from None


def _read_variables(value: Any) -> Any:
    if not isinstance(value, list | dict):
        raise fields.refused(
            "must be a map or a list", "a map NAME: value, or a list of NAME=value"
        )
    problems: list[fields.Problem] = []
    variables: dict[str, str] = {}
    for path, name, text in _variable_items(value, problems):
        problem = _variable_problem(path, name, text)
        if problem is None and name in variables:
            problem = fields.Problem(path=path, value=text, message=f"must not give `{name}` twice")
        if problem is not None:
            problems.append(problem)
        else:
            variables[name] = text
    if problems:
        raise fields.refused_parts(problems)
    return variables


def _variable_items(
    value: list[Any] | dict[Any, Any], problems: list[fields.Problem]
) -> list[tuple[str, Any, Any]]:
    if isinstance(value, dict):
        return [(fields.join_path(str(name)), name, text) for name, text in value.items()]
    items: list[tuple[str, Any, Any]] = []
    for index, entry in enumerate(value):
        path = fields.join_path(index)
        if isinstance(entry, str) and "=" in entry:
            name, _, text = entry.partition("=")
            items.append((path, name, text))
        else:
            message = "must give a variable and its value"
            problems.append(
                fields.Problem(
                    path=path, value=entry, message=message, allowed="a string NAME=value"
                )
            )
    return items


def _variable_problem(path: str, name: Any, text: Any) -> fields.Problem | None:
    if not isinstance(name, str) or not _VARIABLE_NAME.match(name):
        message, allowed = "must be named as a variable", "letters, digits and _, no digit first"
        return fields.Problem(path=path, value=name, message=message, allowed=allowed)
    if name in _DEVICES and isinstance(text, dict | list):
        message, hint = (
            "must be a string: variables are not divided by kinds of devices",
            f"move the variables of {name!r} one level up.",
        )
        return fields.Problem(path=path, value=text, message=message, allowed="a string", hint=hint)
    if not isinstance(text, str) or "\0" in text:
        message, hint = "must be a string", "put the value in quotes."
        return fields.Problem(path=path, value=text, message=message, allowed="a string", hint=hint)
    if name == _OWN_VARIABLE:
        message = "is set by Paceline itself and must be left out"
        return fields.Problem(path=path, value=text, message=message)
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


class Environment(fields.Section):
    """Environment of the entrypoint: interpreter, variables and secrets."""

    python: Annotated[str, fields.text_field(_check_python)] | None = Field(
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
    working_dir: fields.AbsolutePath | None = Field(
        default=None,
        description="Absolute path to run in; null is a private copy of the submitted directory.",
    )
    uv: bool = Field(
        default=False,
        description="Install what `uv.lock` names into the copy of the submitted directory, by"
        " `uv sync --frozen`, and run in that environment.",
    )

    warm: bool = Field(
        default=True,
        description="Whether the entrypoint may be a fork of a process that has loaded torch; else"
        " it is a new interpreter.",
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
                    raise fields.refused(
                        f"must not be given with `environment.{name}`, {why}", "false"
                    )
        return value

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        twice = sorted(value.keys() & info.data.get("variables", {}).keys())
        if twice:
            message = "must not be given in `environment.variables` as well"
            raise fields.refused_parts(
                [fields.Problem(path=name, value=HIDDEN, message=message) for name in twice]
            )
        return value


Topic = Literal["alert", "experiment_ended", "experiment_failed", "trial_ended", "trial_failed"]
AlertLevel = Literal["debug", "info", "warn", "error"]
_Limit = Annotated[float, Field(allow_inf_nan=False)]
_MAX_THRESHOLDS = 20


class Threshold(fields.Section):
    """Limit on a metric; the first value of each trial beyond the limit gives a message."""

    metric: fields.Text = Field(description="Name of the metric.")
    group: fields.Text | None = Field(
        default=None, description="Group of the metric, such as `validation`; null is any group."
    )
    above: _Limit | None = Field(default=None, description="Largest value without a message.")
    below: _Limit | None = Field(default=None, description="Smallest value without a message.")

    @model_validator(mode="after")
    def _check_limit(self) -> "Threshold":
        if (self.above is None) == (self.below is None):
            raise fields.refused("must have one limit", "`above` or `below`")
        return self


class Notify(fields.Section):
    """Choice of messages about experiments, and of their channels."""

    to: list[fields.Text] = Field(
        default=[], description="Channels of the master, by their names in its `notify.yaml`."
    )
    events: list[Topic] = Field(
        default=["alert", "experiment_ended", "experiment_failed"],
        description="Events that give a message. An experiment that is canceled has `ended`.",
    )
    alert_level: AlertLevel = Field(
        default="info", description="Least level of the alerts that give a message."
    )
    thresholds: Annotated[list[Threshold], Field(max_length=_MAX_THRESHOLDS)] = Field(
        default=[], description="Limits on metrics; each trial gives one message for each limit."
    )
    silent_after: fields.Age | None = Field(
        default=None,
        description="Time without a report from a running trial, after which there is a message.",
    )
    gpu_idle_after: fields.Age | None = Field(
        default=None,
        description="Time with all GPUs of a node below 5 %, after which there is a message; needs"
        " the system metrics of `core_context.profiler`.",
    )

    @field_validator("events", "thresholds", "silent_after", "gpu_idle_after")
    @classmethod
    def _check_channel(cls, value: object, info: ValidationInfo) -> object:
        # A resolved config names the default events even without a channel.
        default = cls.model_fields[str(info.field_name)].default
        if value != default and not info.data.get("to", True):
            raise fields.refused("has no effect without a channel", hint="name one by `notify.to`.")
        return value
