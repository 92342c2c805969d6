"""The published JSON Schema of the experiment config."""

from typing import Any

from paceline.config._experiment_config import ExperimentConfig
from paceline.config._method_registry import load_search_methods
from paceline.config._section_base import alias_names, given_schema
from paceline.config._storage_section import DirectoryStorage

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
    """Return the JSON Schema of what `validate_config` accepts.

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
    """Let null stand for "not given" in each field that need not be given."""
    required = section.get("required", [])
    for name, field in section.get("properties", {}).items():
        section["properties"][name] = field = {k: v for k, v in field.items() if k != "title"}
        if "const" in field:
            # This field tells the variants of a section apart, so it has to be there.
            del field["default"]
            section["required"] = [name, *required]
            continue
        if name in required or {"type": "null"} in field.get("anyOf", []):
            continue
        outer = {key: field.pop(key) for key in ("description", "default") if key in field}
        options = field["anyOf"] if set(field) == {"anyOf"} else [field]
        section["properties"][name] = {**outer, "anyOf": [*options, {"type": "null"}]}


def _allow_other_name(directory: dict[str, Any]) -> None:
    names = alias_names("path", DirectoryStorage.model_fields["path"])
    properties = directory["properties"]
    properties.update(dict.fromkeys(names, properties["path"]))
    directory["required"] = ["type"]
    directory["oneOf"] = [given_schema(name) for name in names]
