"""Validation of configs, merging of two configs, and the published JSON Schema."""

import copy
import dataclasses
import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.config import _fields_and_problems as fields
from paceline.config._checkpoint_storage_section import (
    CLOUD_TYPES,
    DefaultStorage,
    DirectoryStorage,
    S3Storage,
    SharedFsStorage,
    UrlStorage,
    expand_location,
)
from paceline.config._environment_and_secrets import Environment, Notify, Threshold, fill_secrets
from paceline.config._experiment_config import (
    ExperimentConfig,
    Idle,
    LogPolicy,
    Profiling,
    Reproducibility,
    Resources,
    SlotRange,
)
from paceline.config._read_yaml import apply_overrides, read_yaml_file
from paceline.config._searcher_registry import (
    MissingSearcher,
    load_search_methods,
    searcher_sections,
)
from paceline.config._searcher_section import REMOVED_SEARCHERS, SamplerSection, SearchLimits

_STORAGES: dict[str, type[BaseModel]] = {
    "directory": DirectoryStorage,
    "shared_fs": SharedFsStorage,
    "s3": S3Storage,
    "url": UrlStorage,
}
_SECTIONS: dict[tuple[str, ...], type[BaseModel]] = {
    (): ExperimentConfig,
    ("resources",): Resources,
    ("resources", "slots_per_trial", "range"): SlotRange,
    ("reproducibility",): Reproducibility,
    ("environment",): Environment,
    ("profiling",): Profiling,
    ("optimizations",): fields.Optimizations,
    ("checkpoint_storage", "default"): DefaultStorage,
    **{("checkpoint_storage", name): section for name, section in _STORAGES.items()},
}
# Sections of which no field stands in for an unknown one elsewhere.
_OWN_SECTIONS: dict[tuple[str, ...], type[BaseModel]] = {
    ("notify",): Notify,
    ("notify", "thresholds"): Threshold,
    ("idle",): Idle,
    ("log_policies",): LogPolicy,
}
_UNIONS = (("searcher",), ("checkpoint_storage",), ("resources", "slots_per_trial"))

# Allowed values by pydantic's error type; names in braces come from the error's context.
_ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "a map",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "> {gt:g}",
    "greater_than_equal": ">= {ge:g}",
    "int_type": "an integer",
    "less_than_equal": "<= {le:.16g}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a map of fields",
    "model_type": "a map of fields",
    "string_type": "a string",
}


def load_config(
    source: str | Path | dict[str, Any], overrides: Sequence[str] = ()
) -> ExperimentConfig:
    """Load and check an experiment config.

    Args:
        source: the path of a YAML file, or the config as plain data.
        overrides: fields to set first, each as `a.b=value`. A value that starts with `[`, `{` or a
            quote is YAML, one with a comma is a list of YAML scalars, any other one YAML scalar.

    A secret without a value is taken from the environment of this process.

    Raises:
        ConfigError: the file, an override or the config is not valid, or a secret is not set.
    """
    data = source if isinstance(source, dict) else read_yaml_file(Path(source))
    data = apply_overrides(data, overrides) if overrides else data
    return validate_config(fill_secrets(data, os.environ))


def validate_config(data: dict[str, Any]) -> ExperimentConfig:
    """Check plain data and return the config.

    Raises:
        ConfigError: something is wrong; the error holds every problem that was found.
    """
    given: object = data
    if not isinstance(given, dict):
        message, allowed = "must be a map of fields", "fields such as `entrypoint` and `searcher`"
        raise fields.ConfigError(
            [fields.Problem(path="", value=data, message=message, allowed=allowed)]
        )
    try:
        return ExperimentConfig.model_validate(data)
    except ValidationError as e:
        is_unknown_method = any(
            error["type"] == "union_tag_invalid" and error["loc"] == ("searcher",)
            for error in e.errors(include_url=False)
        )
        if is_unknown_method and load_search_methods():
            return validate_config(data)
        problems = [_config_problem_of(error) for error in _flatten_config_errors(e)]
    # Problems in the user's words: their text covers all of pydantic's error.
    raise fields.ConfigError(problems)


def read_stored_config(data: dict[str, Any]) -> ExperimentConfig:
    """Return a config resolved and stored before.

    Its search method may be missing by now; its section is a `MissingSearcher` then.

    Raises:
        ConfigError: something else is wrong with it.
    """
    try:
        return validate_config(data)
    except fields.ConfigError as error:
        if any(problem.path.split(".")[0] != "searcher" for problem in error.problems):
            raise
    searcher = MissingSearcher.model_validate(data["searcher"])
    # The other fields are checked against a searcher that fits any of them.
    stand_in = {"name": "single", "metric": searcher.metric, "max_length": {"batches": 1}}
    config = validate_config(data | {"searcher": stand_in})
    return config.model_copy(update={"searcher": searcher})


def _flatten_config_errors(error: ValidationError) -> Iterator[ErrorDetails | fields.Problem]:
    """Yield each error; an error about the parts of a value becomes its single problems."""
    for details in error.errors(include_url=False):
        if details["type"] != "refused_parts":
            yield details
            continue
        start = fields.join_path(*_plain_path(details["loc"]))
        for part in details["ctx"]["problems"]:
            yield dataclasses.replace(part, path=fields.join_path(start, part.path))


def _config_problem_of(details: ErrorDetails | fields.Problem) -> fields.Problem:
    if isinstance(details, fields.Problem):
        return details
    kind, path = details["type"], fields.join_path(*_plain_path(details["loc"]))
    value, context = details["input"], details.get("ctx", {})
    if kind == "refused":
        return fields.Problem(path=path, **{"value": value, **context})
    if kind == "extra_forbidden":
        return _unknown_config_field(details["loc"], path, value)
    if kind == "missing":
        return _missing_field(details["loc"], path)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_config_kind(path, value)
    if kind == "invalid_key":
        section = fields.join_path(*_plain_path(details["loc"][:-1]))
        message, hint = "must have strings as names", "put the name in quotes."
        return fields.Problem(path=section, value=details["loc"][-1], message=message, hint=hint)
    if kind not in _ALLOWED:
        return fields.Problem(path=path, value=value, message=f"is not valid: {details['msg']}")
    allowed = _ALLOWED[kind].format(**context)
    for bound in (context[name] for name in ("ge", "gt", "le") if name in context):
        allowed = f"{'an integer' if isinstance(bound, int) else 'a number'} {allowed}"
    return fields.Problem(path=path, value=value, message=f"must be {allowed}", allowed=allowed)


def _plain_path(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the location without the variant name inserted by pydantic."""
    for union in _UNIONS:
        if location[: len(union)] == union:
            return union + location[len(union) + 1 :]
    return location


def _section_of(location: tuple[int | str, ...]) -> type[BaseModel]:
    # Items of lists have no names.
    place = tuple(part for part in location[:-1] if isinstance(part, str))
    return (_sections() | _OWN_SECTIONS)[place]


def _sections() -> dict[tuple[str, ...], type[BaseModel]]:
    parts: dict[str, type[BaseModel]] = {"limits": SearchLimits, "sampler": SamplerSection}
    sections = searcher_sections().items()
    nested: dict[tuple[str, ...], type[BaseModel]] = {
        ("searcher", name, part): one for name, _ in sections for part, one in parts.items()
    }
    return _SECTIONS | nested | {("searcher", name): one for name, one in sections}


def _missing_field(location: tuple[int | str, ...], path: str) -> fields.Problem:
    section, name = _section_of(location), str(location[-1])
    meaning = (section.model_fields[name].description or "").rstrip(".")
    message = f"is required: {meaning[:1].lower()}{meaning[1:]}" if meaning else "is required"
    return fields.Problem(path=path, value=fields.MISSING, message=message)


def _unknown_config_field(
    location: tuple[int | str, ...], path: str, value: object
) -> fields.Problem:
    section, name = _section_of(location), str(location[-1])
    known = sorted(fields.field_names(section))
    if name in known:
        other = next(
            n for n, field in section.model_fields.items() if name in fields.alias_names(n, field)
        )
        message = f"is an older name of `{other}`, which is given as well"
        return fields.Problem(path=path, value=value, message=message, hint="keep one of the two.")
    if section is DefaultStorage and (kind := _storage_with(name)):
        message, hint = "needs the type of the storage", f"add `type: {kind}`."
        return fields.Problem(path=path, value=value, message=message, hint=hint)
    start = str(location[0]) if len(location) > 1 else ""
    refused_field = fields.REFUSED_FIELDS.get(start, {}).get(name)
    if refused_field is not None:
        message, hint = refused_field
        return fields.Problem(path=path, value=value, message=message, hint=hint)
    return fields.Problem(
        path=path,
        value=value,
        message="is not a known field",
        allowed=", ".join(known),
        hint=_did_you_mean(start, name, known),
    )


def _storage_with(field: str) -> str | None:
    for kind, section in _STORAGES.items():
        if field in section.model_fields:
            return kind
    return None


def _did_you_mean(start: str, name: str, known: list[str]) -> str:
    for location, section in _sections().items():
        if name in section.model_fields and location[:1] != ((start,) if start else ()):
            return f"did you mean `{fields.join_path(*location[:1], name)}`?"
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{close[0]}`?" if close else ""


def _wrong_config_kind(path: str, value: object) -> fields.Problem:
    """Return the problem of a searcher or storage of an unknown kind."""
    field, names = ("type", list(_STORAGES))
    if path == "searcher":
        field, names = "name", list(searcher_sections())
    *first, last = (f"`{name}`" for name in names)
    allowed = f"{', '.join(first)} or {last}"
    given = value.get(field, fields.MISSING) if isinstance(value, dict) else value
    message, hint = "is not known", ""
    if given is fields.MISSING:
        message = "is required"
    elif not isinstance(given, str):
        message = "must be a string"
    elif path == "searcher" and given in REMOVED_SEARCHERS:
        message, hint = "is no longer a search method", f"use {REMOVED_SEARCHERS[given]}."
    elif path != "searcher" and given in CLOUD_TYPES:
        message = "is not offered yet"
    else:
        close = difflib.get_close_matches(given, names, n=1)
        hint = f"did you mean `{close[0]}`?" if close else ""
        if path == "searcher" and not close:
            hint = "install the package that offers it, also for the master."
    return fields.Problem(
        path=f"{path}.{field}", value=given, message=message, allowed=allowed, hint=hint
    )


# Fields of every kind of a section: they survive a change of the kind in a merge.
_SHARED = {
    "searcher": (
        "metric",
        "smaller_is_better",
        "source_trial_id",
        "source_checkpoint_uuid",
        "stop_timeout",
    ),
    "checkpoint_storage": (
        "save_experiment_best",
        "save_trial_best",
        "save_trial_latest",
        "save_age",
        "save_bytes",
    ),
}
_KIND = {"searcher": "name", "checkpoint_storage": "type"}
# Alternative fields for the same setting: any in the higher config drops those of the lower.
_ALTERNATIVES = {
    "searcher": (
        (("max_length",), ("time_metric", "max_time")),
        (("source_trial_id",), ("source_checkpoint_uuid",)),
        (("objectives",), ("metric", "smaller_is_better")),
    ),
    "checkpoint_storage": ((("path",), ("container_path",)),),
    "environment": ((("variables",), ("environment_variables",)),),
}
# A map of one unit and its number is one value.
_LENGTHS = (("searcher", "max_length"), ("min_validation_period",), ("min_checkpoint_period",))


def merge_configs(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Return `high` with its open fields taken from `low`; neither is changed.

    Fields are merged one by one, through nested maps. Labels are united. A hyperparameter and a
    length are replaced as a whole; nested maps of hyperparameters are merged, and bounds into a
    range. A searcher or storage of another kind replaces the lower one, save for the fields that
    all kinds share. A field that is null is left open, except for a hyperparameter, where null is a
    value.
    """
    merged = _merge_fields(copy.deepcopy(low), copy.deepcopy(high), path=())
    return {key: value for key, value in merged.items() if value is not None}


def _merge_fields(
    low: dict[str, Any], high: dict[str, Any], path: tuple[str, ...]
) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        below = result.get(key)
        # Null means that this config leaves the field to the lower one.
        if value is None and below is not None:
            continue
        result[key] = value if below is None else _merge_values(below, value, (*path, key))
    return result


def _merge_values(low: Any, high: Any, path: tuple[str, ...]) -> Any:
    name = path[0]
    if path == ("labels",) and isinstance(low, list) and isinstance(high, list):
        return low + [label for label in high if label not in low]
    if path == ("checkpoint_storage",):
        low, high = expand_location(low), expand_location(high)
    if path == ("environment",):
        low, high = _with_maps(low), _with_maps(high)
    if not isinstance(low, dict) or not isinstance(high, dict) or path in _LENGTHS:
        return high
    if path == ("hyperparameters",):
        return _merge_space(low, high)
    if len(path) == 1 and name in _KIND:
        low = _keep_shared(low, high, name)
    if len(path) == 1:
        low = _drop_alternatives(low, high, name)
    return _merge_fields(low, high, path)


def _merge_space(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        below = result.get(key)
        if _is_nested(value) and _is_nested(below):
            value = _merge_space(below, value)
        elif _is_nested(value) and isinstance(below, dict) and value.keys() <= _RANGE_FIELDS:
            # A bound alone would be a constant, which nobody means by it.
            value = below | value
        result[key] = value
    return result


_RANGE_FIELDS = {"minval", "maxval", "base", "count", "vals", "val"}


def _is_nested(node: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(node, dict) and "type" not in node


def _keep_shared(low: dict[str, Any], high: dict[str, Any], name: str) -> dict[str, Any]:
    kind = high.get(_KIND[name])
    if kind is None or kind == low.get(_KIND[name]):
        return low
    shared: tuple[str, ...] = _SHARED[name]
    if name == "searcher" and getattr(searcher_sections().get(kind), "takes_objectives", False):
        shared += ("objectives",)
    return {key: value for key, value in low.items() if key in shared}


def _drop_alternatives(low: dict[str, Any], high: dict[str, Any], name: str) -> dict[str, Any]:
    dropped: set[str] = set()
    for pair in _ALTERNATIVES.get(name, ()):
        for ours, theirs in (pair, pair[::-1]):
            if any(high.get(field) is not None for field in ours):
                dropped.update(theirs)
    return {key: value for key, value in low.items() if key not in dropped}


def _with_maps(environment: Any) -> Any:
    """Return the environment with variables and secrets as maps under their own names."""
    if not isinstance(environment, dict):
        return environment
    result = dict(environment)
    if result.get("variables") is None and "environment_variables" in result:
        result["variables"] = result.pop("environment_variables")
    for field in ("variables", "secrets"):
        entries = result.get(field)
        if isinstance(entries, list) and all(isinstance(e, str) and "=" in e for e in entries):
            result[field] = dict(entry.split("=", 1) for entry in entries)
    return result


_INTEGER_OR_NULL = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}


def _range_schema(kind: str, bound: str, **more: Any) -> dict[str, Any]:
    properties = {
        "type": {"const": kind},
        "minval": {"type": bound},
        "maxval": {"type": bound},
        "count": _INTEGER_OR_NULL,
        **more,
    }
    return {
        "type": "object",
        "properties": properties,
        "required": ["type", "minval", "maxval", *more],
        "additionalProperties": False,
    }


_HYPERPARAMETER = {
    "description": "A constant, a range, a choice, or a nested map of hyperparameters.",
    "anyOf": [
        {"type": ["null", "boolean", "number", "string", "array"]},
        {
            "type": "object",
            "properties": {"type": {"const": "const"}, "val": {}},
            "required": ["type", "val"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "categorical"},
                "vals": {"type": "array", "minItems": 1},
            },
            "required": ["type", "vals"],
            "additionalProperties": False,
        },
        _range_schema("int", "integer"),
        _range_schema("double", "number"),
        _range_schema("log", "number", base={"type": "number", "exclusiveMinimum": 0}),
        {
            "type": "object",
            "not": {"required": ["type"]},
            "additionalProperties": {"$ref": "#/$defs/Hyperparameter"},
        },
    ],
}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the data accepted by `validate_config`.

    It covers each field; rules between fields, such as `minval` below `maxval`, are left to
    `validate_config`.
    """
    load_search_methods()
    schema = ExperimentConfig.model_json_schema(by_alias=True, mode="validation")
    definitions = schema["$defs"]
    reference = {"$ref": "#/$defs/Hyperparameter"}
    schema["properties"]["hyperparameters"]["additionalProperties"] = reference
    for section in (schema, *definitions.values()):
        _allow_null_in_schema(section)
    definitions["Hyperparameter"] = _HYPERPARAMETER
    environment = definitions["Environment"]["properties"]
    environment["environment_variables"] = environment["variables"]
    _allow_other_name(definitions["DirectoryStorage"])
    storage = schema["properties"]["checkpoint_storage"]
    storage["anyOf"].insert(0, {"type": "string"})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Paceline experiment config",
        "$defs": dict(sorted(definitions.items())),
    }


def _allow_null_in_schema(section: dict[str, Any]) -> None:
    """Let null stand for "not given" in each optional field."""
    required = section.get("required", [])
    for name, field in section.get("properties", {}).items():
        section["properties"][name] = field = {k: v for k, v in field.items() if k != "title"}
        if "const" in field:
            # Discriminator of a section's variants: required, and so without a default.
            del field["default"]
            section["required"] = [name, *required]
            continue
        if name in required or {"type": "null"} in field.get("anyOf", []):
            continue
        outer = {key: field.pop(key) for key in ("description", "default") if key in field}
        options = field["anyOf"] if set(field) == {"anyOf"} else [field]
        section["properties"][name] = {**outer, "anyOf": [*options, {"type": "null"}]}


def _allow_other_name(directory: dict[str, Any]) -> None:
    names = fields.alias_names("path", DirectoryStorage.model_fields["path"])
    properties = directory["properties"]
    properties.update(dict.fromkeys(names, properties["path"]))
    directory["required"] = ["type"]
    directory["oneOf"] = [fields.given_schema(name) for name in names]
