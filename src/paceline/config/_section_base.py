"""Base class and field types of all config sections."""

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from paceline.config._config_problems import Problem, join_path, refused, refused_parts

# The largest integer that JSON readers in all languages keep exactly.
_MAX_INTEGER = 2**53 - 1
# Waits take seconds as a C integer on some platforms; this is 31 years.
_MAX_SECONDS = 10**9
_MAX_DEPTH = 64
_MAX_NODES = 200_000

Count = Annotated[int, Field(ge=1, le=_MAX_INTEGER)]
NonNegative = Annotated[int, Field(ge=0, le=_MAX_INTEGER)]
Seconds = Annotated[float, Field(ge=0, le=_MAX_SECONDS, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=_MAX_SECONDS, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the config: frozen, strict about types and about unknown fields.

    A field that is null counts as not given, so it gets its default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = field_names(cls)
        return {k: v for k, v in data.items() if v is not None or k not in known}


def alias_names(name: str, field: FieldInfo) -> list[str]:
    """Return the names that one field may be written with."""
    alias = field.validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [name]


def field_names(model: type[BaseModel]) -> list[str]:
    """Return the names that a section's fields may be written with."""
    return [n for name, field in model.model_fields.items() for n in alias_names(name, field)]


def given_schema(*names: str) -> dict[str, Any]:
    """Return the JSON Schema of a map in which the fields are there and not null."""
    not_null = {"not": {"type": "null"}}
    return {"required": list(names), "properties": dict.fromkeys(names, not_null)}


def _check_text(value: str) -> str:
    if not value.strip() or "\0" in value:
        raise refused("must be text that is not blank", "a non-empty string")
    return value


def text_field(check: Callable[[str], str] = _check_text) -> Any:
    """Return a validator that leaves other types than strings to the field's own type."""
    return BeforeValidator(lambda value: check(value) if isinstance(value, str) else value)


Text = Annotated[str, text_field()]


def _check_absolute(value: str) -> str:
    if not value.startswith("/") or "\0" in value:
        raise refused("must be an absolute path", "a path that starts with /")
    return value


AbsolutePath = Annotated[str, text_field(_check_absolute)]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _JsonCopy:
    """Copies a value of a free-form map and collects what JSON cannot hold."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._num_nodes = 0

    def copy(self, value: Any, path: str, depth: int) -> Any:
        self._num_nodes += 1
        # Anchors can make a value contain itself, or double at every level.
        if depth > _MAX_DEPTH or self._num_nodes > _MAX_NODES:
            what = f"must have at most {_MAX_DEPTH} levels and {_MAX_NODES} values"
            raise refused_parts([Problem(path=path, value="...", message=what)])
        if isinstance(value, dict):
            return {
                key: self.copy(item, join_path(path, key), depth + 1)
                for key, item in value.items()
                if self._is_name(key, path)
            }
        if isinstance(value, list | tuple):
            return [
                self.copy(item, join_path(path, index), depth + 1)
                for index, item in enumerate(value)
            ]
        self._check_leaf(value, path)
        return value

    def _is_name(self, key: Any, path: str) -> bool:
        if isinstance(key, str) and key and _is_unicode(key):
            return True
        self.problems.append(
            Problem(
                path=path,
                value=key,
                message="must have non-empty strings as names",
                allowed="names such as `lr`",
                hint="put the name in quotes.",
            )
        )
        return False

    def _check_leaf(self, value: Any, path: str) -> None:
        if isinstance(value, float):
            is_fine, allowed = math.isfinite(value), "a finite number"
        elif isinstance(value, int):
            is_fine, allowed = -(2**63) <= value < 2**63, "an integer of 64 bits"
        elif isinstance(value, str):
            is_fine, allowed = _is_unicode(value), "text without lone surrogates"
        else:
            is_fine = value is None
            allowed = "null, true, false, a number, a string, a list or a map"
        if is_fine:
            return
        message = "must be a value that JSON can hold"
        self.problems.append(Problem(path=path, value=value, message=message, allowed=allowed))


def copy_json_map(value: dict[Any, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return a deep copy of a free-form map, and a problem for each part that is not JSON."""
    copier = _JsonCopy()
    return copier.copy(value, "", 0), copier.problems


def _check_json_map(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    result, problems = copy_json_map(value)
    if problems:
        raise refused_parts(problems)
    return result


JsonMap = Annotated[dict[str, Any], BeforeValidator(_check_json_map)]


def without_effect(reason: str) -> Any:
    """Return a field of older configs that is accepted and ignored.

    Args:
        reason: Why it has no effect.
    """
    return Field(
        default=None,
        description=f"Has no effect: {reason}.",
        json_schema_extra={"deprecated": True},
    )
