"""Base class and field types of all config sections."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from paceline.config._config_problems import refused

# The largest integer that JSON readers in all languages keep exactly.
_MAX_INTEGER = 2**53 - 1
# Waits take seconds as a C integer on some platforms; this is 31 years.
_MAX_SECONDS = 10**9

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
