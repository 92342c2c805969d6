"""Fields of config sections, and problems reported together.

The fields: base class, lengths, periods, maps, and older fields that are ignored or refused.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from paceline._base.arguments_and_errors import (
    AGE_FORMS,
    AGE_PATTERN,
    SIZE_FORMS,
    SIZE_PATTERN,
    bytes_of,
    seconds_of,
)
from paceline._base.exceptions import PicklableError

_LONGEST_VALUE = 120


class _Missing(Enum):
    NOTHING = "nothing"

    def __repr__(self) -> str:
        return self.value


MISSING: Final = _Missing.NOTHING
"""The value of a problem about a field that is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Problem of a config: the place, the value, and the reason.

    `path` is dotted from the top of the config (`searcher.max_trials`), `value` is the value
    there (`MISSING` without one), `message` continues a sentence that starts with the path,
    `allowed` lists the valid values and `hint` the fix; both may be empty. The text of a
    problem leaves out `allowed` where the message says it already, and a long one beside a hint.
    """

    path: str
    value: object
    message: str
    allowed: str = ""
    hint: str = ""

    @property
    def value_text(self) -> str:
        """Return the value as a short line of JSON."""
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
        # A near name helps more than a list of thirty.
        is_shown = len(self.allowed) <= _LONGEST_VALUE or not self.hint
        if self.allowed and self.allowed not in self.message and is_shown:
            sentences.append(f"Allowed: {self.allowed}.")
        if self.hint:
            sentences.append(f"Hint: {self.hint}")
        return " ".join(" ".join(sentences).splitlines())


class ConfigError(PicklableError, ValueError):
    """Raised when a config is not valid; the text has a line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def refused(
    message: str, allowed: str = "", *, hint: str = "", is_missing: bool = False
) -> PydanticCustomError:
    """Return the error for a validator to raise when refusing the value of its field."""
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
    """Return the accepted names of a field."""
    alias = field.validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [name]


def field_names(model: type[BaseModel]) -> list[str]:
    """Return the accepted names of all fields of a section."""
    return [n for name, field in model.model_fields.items() for n in alias_names(name, field)]


def given_schema(*names: str) -> dict[str, Any]:
    """Return the JSON Schema of a map with the fields present and not null."""
    not_null = {"not": {"type": "null"}}
    return {"required": list(names), "properties": dict.fromkeys(names, not_null)}


def _check_text(value: str) -> str:
    if not value.strip() or "\0" in value:
        raise refused("must be text that is not blank", "a non-empty string")
    return value


def text_field(check: Callable[[str], str] = _check_text) -> Any:
    """Return a validator of strings; other types are left to the field's own type."""
    return BeforeValidator(lambda value: check(value) if isinstance(value, str) else value)


Text = Annotated[str, text_field()]


def _check_absolute(value: str) -> str:
    if not value.startswith("/") or "\0" in value:
        raise refused("must be an absolute path", "a path that starts with /")
    return value


AbsolutePath = Annotated[str, text_field(_check_absolute)]


# Deeper or larger values could exhaust the stack or the memory of a reader.
_MAX_DEPTH = 64
_MAX_NODES = 200_000


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _JsonCopy:
    """Copies a value of a free-form map and collects the parts without a JSON form."""

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
    """Return a deep copy of a free-form map, and a problem for each part outside of JSON."""
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


CONTINUOUS = "continuous"
UNITS = ("batches", "epochs", "records")
_MAX_LENGTH = 2**53 - 1


def split_length(value: Any, *, minimum: int = 1) -> tuple[str, int] | None:
    """Return the unit and number of a length, or None for any other value."""
    if _is_count(value, minimum):
        return "batches", value
    if isinstance(value, dict) and len(value) == 1:
        [(unit, number)] = value.items()
        if unit in UNITS and _is_count(number, minimum):
            return unit, number
    return None


def _is_count(value: Any, minimum: int) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer and minimum <= value <= _MAX_LENGTH


def _check_length(kind: str, minimum: int, *words: str) -> BeforeValidator:
    units = ", ".join(f"{{{unit}: N}}" for unit in UNITS)
    allowed = ", or ".join([f"an integer >= {minimum}", f"one of {units}", *words])

    def check(value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        if split_length(value, minimum=minimum) is None:
            raise refused(f"must be a {kind}", allowed)
        return dict(value) if isinstance(value, dict) else value

    return BeforeValidator(check)


def _length_schema(minimum: int, *words: str) -> WithJsonSchema:
    number = {"type": "integer", "minimum": minimum}
    units = {
        "type": "object",
        "properties": dict.fromkeys(UNITS, number),
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return WithJsonSchema({"anyOf": [number, *({"const": word} for word in words), units]})


def _quantity(read: Callable[[Any], Any], kind: str, allowed: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        number = read(value)
        if number is None:
            raise refused(f"must be {kind}", allowed)
        return number

    return BeforeValidator(check)


def _quantity_schema(number: dict[str, Any], pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [number, {"type": "string", "pattern": pattern}]})


MaxLength = Annotated[int | dict[str, int], _check_length("length", 1), _length_schema(1)]
Period = Annotated[int | dict[str, int], _check_length("period", 0), _length_schema(0)]
CheckpointPeriod = Annotated[
    int | str | dict[str, int],
    _check_length("period", 0, CONTINUOUS),
    _length_schema(0, CONTINUOUS),
]
NumBytes = Annotated[
    int,
    _quantity(bytes_of, "a size", SIZE_FORMS),
    _quantity_schema({"type": "integer", "minimum": 1}, SIZE_PATTERN),
]
Age = Annotated[
    float,
    _quantity(seconds_of, "a time", AGE_FORMS),
    _quantity_schema({"type": "number", "exclusiveMinimum": 0}, AGE_PATTERN),
]


def without_effect(reason: str) -> Any:
    """Return a field of older configs, accepted and ignored.

    Args:
        reason: Why it has no effect.
    """
    return Field(
        default=None,
        description=f"Has no effect: {reason}.",
        json_schema_extra={"deprecated": True},
    )


_ONE_PIECE = "gradients are reduced in one piece"
_WITHOUT_EFFECT = {
    "average_training_metrics": "training metrics are always averaged, over all ranks",
    "gradient_compression": "gradients are reduced as they are",
    "tensor_fusion_threshold": _ONE_PIECE,
    "tensor_fusion_cycle_time": _ONE_PIECE,
    "auto_tune_tensor_fusion": _ONE_PIECE,
    "grad_updates_size_file": "sizes of gradients are not recorded",
}


def _check_precision(value: Any) -> Any:
    if value in ("O2", "O3"):
        raise refused(
            "is not offered, as weights stay in full precision",
            "'O0' or 'O1'",
            hint="use O1, which computes in 16 bits where that is safe.",
        )
    return value


def _ignored(name: str) -> Any:
    return without_effect(_WITHOUT_EFFECT[name])


class Optimizations(Section):
    """How gradients are aggregated, and settings of other ways to reduce them."""

    aggregation_frequency: Count = Field(
        default=1, description="Global batches per optimizer step."
    )
    average_aggregated_gradients: bool = Field(
        default=True,
        description="Whether the gradient of several batches is their mean, not their sum.",
    )
    mixed_precision: Annotated[Literal["O0", "O1"], BeforeValidator(_check_precision)] = Field(
        default="O0",
        description="Precision of a trainer: O0 is fp32, O1 is fp16 with a scaled loss.",
    )
    average_training_metrics: bool | None = _ignored("average_training_metrics")
    gradient_compression: bool | None = _ignored("gradient_compression")
    tensor_fusion_threshold: NonNegative | None = _ignored("tensor_fusion_threshold")
    tensor_fusion_cycle_time: NonNegative | None = _ignored("tensor_fusion_cycle_time")
    auto_tune_tensor_fusion: bool | None = _ignored("auto_tune_tensor_fusion")
    grad_updates_size_file: Text | None = _ignored("grad_updates_size_file")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each given setting without effect."""
        return tuple(
            f"`optimizations.{name}` has no effect: {reason}."
            for name, reason in _WITHOUT_EFFECT.items()
            if getattr(self, name) is not None
        )


class RefusedField(NamedTuple):
    """Reason to refuse a field, as the end of a sentence, and a hint at the replacement."""

    reason: str
    hint: str = "leave it out."


_LATER = RefusedField("is not offered yet")
_NO_CONTAINERS = RefusedField("is not offered, as Paceline runs trials without containers")
_IMAGE = "run the command in an image by `environment.prefix: [apptainer, exec, IMAGE]`."
_LABELS = "mark the experiment by `labels: [NAME]`; lists of experiments filter by them."
_POOL = "describe a pool with `starter: slurm` in `pools.yaml`, and name it by `resources.pool`."
_FROM_ENVIRONMENT = RefusedField(
    "comes from the environment of the master and of each node's runner (AWS_ACCESS_KEY_ID,"
    " AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
)

REFUSED_FIELDS: dict[str, dict[str, RefusedField]] = {
    "": {
        "bind_mounts": RefusedField(
            _NO_CONTAINERS.reason,
            "use the paths of the machine; of an image in `environment.prefix`, its own option for"
            " mounts, such as `--bind`.",
        ),
        "data_layer": RefusedField(_LATER.reason, "read files and objects by `paceline.data`."),
        "integrations": _LATER,
        "internal": _LATER,
        "pbs": RefusedField(_LATER.reason, "start `paceline runner` in a job of PBS."),
        "project": RefusedField(_LATER.reason, _LABELS),
        "retention_policy": RefusedField(
            _LATER.reason,
            "leave it out; `paceline experiment delete` deletes logs too.",
        ),
        "security": _LATER,
        "slurm": RefusedField(_LATER.reason, _POOL),
        "tensorboard_storage": RefusedField(
            _LATER.reason,
            "leave it out; TensorBoard files are in the checkpoint storage, below `tensorboard`.",
        ),
        "workspace": RefusedField(_LATER.reason, _LABELS),
    },
    "resources": {
        "agent_label": RefusedField(_LATER.reason, "name a pool of nodes by `resources.pool`."),
        "devices": RefusedField(_NO_CONTAINERS.reason, "leave it out; trials see all devices."),
        "is_single_node": RefusedField(
            _LATER.reason, "leave it out; a trial takes one node if one has enough slots."
        ),
        "native_parallel": _LATER,
        "shm_size": RefusedField(_NO_CONTAINERS.reason, "leave it out; trials use /dev/shm."),
        "slots": RefusedField(_LATER.reason, "give `resources.slots_per_trial`."),
    },
    "environment": {
        **dict.fromkeys(
            ("add_capabilities", "drop_capabilities", "ports", "proxy_ports"), _NO_CONTAINERS
        ),
        **dict.fromkeys(
            ("force_pull_image", "image", "registry_auth"),
            RefusedField(_NO_CONTAINERS.reason, _IMAGE),
        ),
        "pod_spec": RefusedField(
            _NO_CONTAINERS.reason,
            "describe the pods by a pool with `starter: kubernetes` in `pools.yaml`.",
        ),
    },
    "checkpoint_storage": {
        **dict.fromkeys(
            ("checkpoint_path", "container_path", "propagation", "tensorboard_path"), _NO_CONTAINERS
        ),
        **dict.fromkeys(("access_key", "secret_key", "endpoint_url"), _FROM_ENVIRONMENT),
    },
}
"""For each section, why a field is refused; a field that the section has comes before this."""
