"""Rules for configs: templates with fields that experiments start from, and policies that bind."""

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from urllib.parse import unquote

from pydantic import Field, ValidationError

from paceline.config import _fields_and_problems as fields
from paceline.config._checkpoint_storage_section import storage_root
from paceline.config._searcher_registry import searcher_sections
from paceline.config._validate_config import json_schema, merge_configs, validate_config

DEFAULT_TEMPLATE = "default"
"""Name of the template that each experiment of its project starts from."""
# What null stands for where it is no absence.
_MEANT = {"resources.pool": "default", "resources.priority": 42}
_STORAGE = "checkpoint_storage"
_Scalar = bool | int | float | str | None


class Bounds(fields.Section):
    """Least and greatest number that a field may have."""

    min: float | None = Field(default=None, description="The least.")
    max: float | None = Field(default=None, description="The greatest.")


class ConfigPolicy(fields.Section):
    """Conditions that configs of a project must meet. Fields are named by dotted paths."""

    required: list[str] = Field(default=[], description="Fields that must not be empty.")
    limits: dict[str, Bounds] = Field(default={}, description="Bounds of numbers.")
    allowed: dict[str, list[_Scalar]] = Field(
        default={}, description="Values that a field may have; `*` stands for any text."
    )
    fixed: dict[str, Any] = Field(default={}, description="Fields of a config, and their values.")


class Rule(NamedTuple):
    """Template or policy with its name and its project, None for all projects."""

    kind: str
    name: str
    project: str | None
    content: Mapping[str, Any]

    @property
    def told(self) -> str:
        """Name for messages."""
        whose = "all projects" if self.project is None else f"the project {self.project}"
        return f"the {self.kind} {self.name!r} of {whose}"

    @property
    def hint(self) -> str:
        """Command that shows the rule."""
        place = "" if self.project is None else f" --project {self.project!r}"
        return f"`paceline {self.kind} show {self.name}{place}` shows it."


def config_layers(rules: Iterable[Rule], template: str | None) -> list[Rule]:
    """Return the rules with fields for a config, those that count least first.

    Args:
        rules: Those for all projects first.
        template: The template chosen by name, if any.

    Raises:
        ConfigError: There is no such template.
    """
    found = list(rules)
    names = (
        [DEFAULT_TEMPLATE] if template in (None, DEFAULT_TEMPLATE) else [DEFAULT_TEMPLATE, template]
    )
    layers = [one for name in names for one in found if one.kind == "template" and one.name == name]
    if template is not None and template not in [one.name for one in layers]:
        known = ", ".join(sorted({one.name for one in found if one.kind == "template"}))
        message = "must be a template of the project or of all projects"
        raise fields.ConfigError(
            [
                fields.Problem(
                    path="template", value=template, message=message, allowed=known or "none"
                )
            ]
        )
    # A policy for all projects counts more than the project's own.
    fixed = [
        one._replace(content=one.content["fixed"])
        for one in reversed(found)
        if one.kind == "policy" and one.content.get("fixed")
    ]
    return layers + fixed


def fill_config(layers: Sequence[Rule], config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with its open fields taken from layers."""
    filled: dict[str, Any] = {}
    for layer in layers:
        filled = merge_configs(filled, dict(layer.content))
    return merge_configs(filled, config) if filled else config


def filled_fields(layers: Sequence[Rule], config: dict[str, Any]) -> dict[str, str]:
    """Return the fields that a config has from layers, each with the layer's name."""
    own = {path for path, value in _leaves(config) if value is not None}
    found = {path: layer.told for layer in layers for path, _ in _leaves(dict(layer.content))}
    filled = {path for path, _ in _leaves(fill_config(layers, config))}
    return {path: told for path, told in found.items() if path in filled - own}


def _leaves(data: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        path = fields.join_path(start, str(key)) if start else str(key)
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def policy_problems(rules: Iterable[Rule], config: Mapping[str, Any]) -> list[fields.Problem]:
    """Return the conditions of policies that a resolved config does not meet."""
    return [
        problem for rule in rules if rule.kind == "policy" for problem in _problems_of(rule, config)
    ]


def _problems_of(rule: Rule, config: Mapping[str, Any]) -> Iterator[fields.Problem]:
    policy = ConfigPolicy.model_validate(rule.content)
    found: list[tuple[str, object, str]] = []
    for path in policy.required:
        value = _value_at(config, path)
        value = value.strip() if isinstance(value, str) else value
        if value is fields.MISSING or value in (None, "", [], {}):
            found.append((path, fields.MISSING, "must be given"))
    for path, bounds in policy.limits.items():
        found += _outside(path, _value_at(config, path), bounds)
    for path, choices in policy.allowed.items():
        value = _value_at(config, path)
        value = _location(value) if path == _STORAGE else value
        told = ", ".join("nothing" if one is None else str(one) for one in choices)
        found += [
            (path, item, f"must be one of {told}")
            for item in (value if isinstance(value, list) else [value])
            if item is not fields.MISSING and not any(_is_like(item, one) for one in choices)
        ]
    for path, value, wanted in _differences(config, _with_fixed(config, policy.fixed)):
        found.append((path, value, f"must be {_shown(wanted)}"))
    for path, value, message in found:
        message = f"{message} by {rule.told}"
        yield fields.Problem(path=path, value=value, message=message, hint=rule.hint)


def _outside(path: str, value: Any, bounds: Bounds) -> Iterator[tuple[str, object, str]]:
    """Yield the bounds that a number, or a range of numbers, is beyond."""
    for bound, end, word, sign in (
        (bounds.min, "min", "at least", 1),
        (bounds.max, "max", "at most", -1),
    ):
        if bound is None or value is fields.MISSING:
            continue
        number: Any = value.get(end) if isinstance(value, dict) else value
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or sign * number < sign * bound:
            yield path, value, f"must be {word} {bound:g}"


def _shown(value: object) -> str:
    return fields.Problem(path="", value=value, message="").value_text


def _with_fixed(config: Mapping[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved config with fixed fields, resolved again as far as it is valid."""
    if not fixed:
        return dict(config)
    try:
        return validate_config(merge_configs(dict(config), fixed)).to_json()
    except fields.ConfigError:
        return merge_configs(dict(config), fixed)


def _differences(
    given: Mapping[str, Any], wanted: Mapping[str, Any], start: str = ""
) -> Iterator[tuple[str, object, object]]:
    for key, value in wanted.items():
        path, own = fields.join_path(start, key), given.get(key, fields.MISSING)
        if isinstance(value, dict) and isinstance(own, dict):
            yield from _differences(own, value, path)
        elif own != value:
            yield path, own, value


def _value_at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field, MISSING if the config's kind has no such field."""
    value: Any = config
    for name in path.split("."):
        if value is None:
            # A section that is not given has none of its fields.
            return None
        if not isinstance(value, dict) or name not in value:
            return fields.MISSING
        value = value[name]
    return _MEANT.get(path) if value is None else value


def _location(storage: Any) -> str | None:
    """Return the place of a storage, without detours through other directories."""
    root = storage_root(storage)
    if root is None or "://" not in root:
        return root and posixpath.normpath(root)
    return root if ".." not in unquote(root).split("/") else ""


def _is_like(value: object, choice: object) -> bool:
    if isinstance(value, str) and isinstance(choice, str):
        return fnmatchcase(value, re.sub(r"([?[])", r"[\1]", choice))
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)


def check_template(content: dict[str, Any]) -> None:
    """Check the fields of a partial config.

    Raises:
        ConfigError: A field is unknown or has a wrong value, or a secret has a value.
    """
    _refuse_secrets(content)
    searcher = content.get("searcher")
    name = searcher.get("name") if isinstance(searcher, dict) else None
    names = [name or "single"]
    if name is None and searcher:
        names = list(searcher_sections())
    found = [_partial_problems(content, one) for one in names]
    if fewest := min(found, key=len):
        raise fields.ConfigError(fewest)


def _partial_problems(content: dict[str, Any], searcher: str) -> list[fields.Problem]:
    whole = {"name": searcher, "metric": "m", "max_length": {"batches": 1}}
    try:
        validate_config(merge_configs({"entrypoint": "-", "searcher": whole}, content))
    except fields.ConfigError as error:
        own = dict(_leaves(content))
        return [
            one
            for one in error.problems
            if one.value is not fields.MISSING
            and not (one.path == "searcher.max_length" and one.path not in own)
        ]
    return []


def _refuse_secrets(content: Mapping[str, Any]) -> None:
    environment = content.get("environment")
    secrets = environment.get("secrets") if isinstance(environment, dict) else None
    if secrets:
        message, hint = "must not be in what all of a project read", "each config names its own."
        raise fields.ConfigError(
            [fields.Problem(path="environment.secrets", value="***", message=message, hint=hint)]
        )


def check_policy(content: dict[str, Any]) -> None:
    """Check a policy: fields that configs have, with bounds of numbers and values that fit.

    Raises:
        ConfigError: A condition could never be met or would have no effect.
    """
    try:
        policy = ConfigPolicy.model_validate(content)
    except ValidationError as error:
        raise fields.ConfigError(
            fields.Problem(
                path=fields.join_path(*one["loc"]),
                value=one["input"],
                message=f"is not valid: {one['msg']}",
                allowed=", ".join(ConfigPolicy.model_fields),
            )
            for one in error.errors(include_url=False)
        ) from None
    check_template(policy.fixed)
    problems = [
        *(_path_problem("required", path) for path in policy.required),
        *(_path_problem("limits", path, bounds) for path, bounds in policy.limits.items()),
        *(_path_problem("allowed", path) for path in policy.allowed),
    ]
    if found := [one for one in problems if one is not None]:
        raise fields.ConfigError(found)


def _path_problem(rule: str, path: str, bounds: Bounds | None = None) -> fields.Problem | None:
    schemas = _schemas_at(path)
    if not schemas or path.startswith("environment.secrets"):
        message = "must name fields of experiment configs"
        return fields.Problem(path=rule, value=path, message=message, allowed="dotted paths")
    if bounds is None:
        return None
    kinds = {str(one.get("type")) for one in schemas}
    is_range = any({"min", "max"} <= one.get("properties", {}).keys() for one in schemas)
    if not (is_range or kinds & {"integer", "number"}) or path.startswith("hyperparameters."):
        return fields.Problem(path=rule, value=path, message="must name fields with a number")
    if bounds.min is None and bounds.max is None:
        message = "must have `min` or `max`"
        return fields.Problem(path=fields.join_path(rule, path), value={}, message=message)
    return None


def _schemas_at(path: str) -> list[dict[str, Any]]:
    """Return the schemas of a field in all kinds of configs; empty for an unknown field."""
    whole = json_schema()
    found = list(_variants(whole, whole["$defs"]))
    for name in path.split("."):
        below: list[dict[str, Any]] = []
        for one in found:
            # No schema stands for any value.
            schema = one.get("properties", {}).get(name, one.get("additionalProperties", not one))
            schema = {} if schema is True else schema
            if isinstance(schema, dict):
                below += _variants(schema, whole["$defs"])
        found = below
    return found


def _variants(schema: dict[str, Any], definitions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in schema:
        yield from _variants(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for name in ("anyOf", "oneOf"):
        for one in schema.get(name, []):
            yield from _variants(one, definitions)
    if not {"$ref", "anyOf", "oneOf"} & schema.keys() or "properties" in schema:
        yield schema
