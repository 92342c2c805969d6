"""Secrets in a config: which values they are, and the config without them."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from paceline.config._config_problems import MISSING, ConfigError, Problem, join_path
from paceline.config._read_yaml import compose_yaml

HIDDEN = "***"
_SECRETS = ("secrets",)
_VARIABLES = ("variables", "environment_variables")
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
    """Tell whether a variable looks like a secret, by its name or as a URL with a password."""
    words = name.upper().split("_")
    looks_so = not _WORDS.isdisjoint(words) or words[-1].endswith(_ENDINGS)
    if looks_so and name.upper() not in _DIRECTORIES:
        return True
    return isinstance(value, str) and _URL_WITH_PASSWORD.search(value) is not None


def hide_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config to be shown: secrets, and variables that look like one, are `***`."""
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
    """Return a resolved config with what stands for a value that is not shown replaced by it.

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
            Problem(
                path=join_path("environment", field, name),
                value=HIDDEN,
                message="must have its value",
                hint="`***` stands for a value that is not shown; fork or continue the experiment"
                " that has it, or give the value.",
            )
            for name in sorted(taken - known.keys())
        ]
        environment[field] = values | {name: known[name] for name in taken & known.keys()}
    if problems:
        raise ConfigError(problems)
    return {**config, "environment": environment}


def fill_secrets(data: dict[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return plain data with each secret that is only named given its value.

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
        raise ConfigError(
            Problem(
                path=join_path("environment", "secrets", str(name)),
                value=MISSING,
                message="must be a variable of your environment, as the config gives no value",
                hint=f"`export {name}=...` before you submit.",
            )
            for name in missing
        )
    return {**data, "environment": {**environment, "secrets": filled}}


def hide_in_text(text: str, values: Iterable[str] = ()) -> str | None:
    """Return the text of a config with its secrets as `***`; None if it is no YAML.

    Values of `environment.secrets`, and of variables that look like a secret, are replaced. All
    else stays as it is, comments included.

    Args:
        text: What somebody submitted.
        values: Further texts to be replaced wherever they stand.
    """
    try:
        root = compose_yaml(text)
    except ConfigError:
        return None
    shown, end = [], 0
    for start, stop, hidden in sorted(set(_secret_spans(root))):
        if start >= end:
            shown += [text[end:start], f'"{hidden}"', "\n" * text[start:stop].endswith("\n")]
            end = stop
    return hide_values("".join([*shown, text[end:]]), values)


def hide_values(text: str, values: Iterable[str]) -> str:
    """Return a text with the values of secrets as `***`, but for such as stand there by chance."""
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
    """Yield where values stand that are secret, and what is to stand there."""
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
    """Yield the fields of a map, those that `<<` brings included."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if key.tag.endswith(":merge"):
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for part in parts:
                yield from _fields_with_secrets(part)
        else:
            yield str(key.value), value
