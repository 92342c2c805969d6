"""Kinds of hyperparameters: constants, choices, ranges; their fields, samples and grid points."""

from __future__ import annotations

import json
import math
import sys
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from paceline._base.arguments_and_errors import Rng
from paceline._base.exceptions import PicklableError

# The width of a range must fit NumPy's signed 64-bit draws.
_INT_LIMIT = 2**61


class SpaceError(PicklableError, ValueError):
    """Raised when a hyperparameter space is not valid; `path` is the dotted name at fault."""

    def __init__(self, path: str, problem: str, hint: str) -> None:
        super().__init__(f"{problem}\nHint: {hint}")
        self.path = path


class Leaf(ABC):
    """Base of a hyperparameter: implementations sample values, and count and make grid points."""

    __slots__ = ()

    @abstractmethod
    def sample(self, rng: Rng) -> Any:
        """Draw a value."""

    @abstractmethod
    def num_points(self) -> int:
        """Return how many values the grid has along this axis.

        Raises:
            SpaceError: If the axis has no `count`.
        """

    @abstractmethod
    def point(self, index: int) -> Any:
        """Return the value at `index` (from 0) of the grid's axis."""

    @abstractmethod
    def at(self, share: float) -> Any:
        """Return the value at a share of the range, from 0 to 1."""

    @abstractmethod
    def share(self, value: Any) -> float:
        """Return where a value is in the range, from 0 to 1: `at` leads back to the value."""

    @abstractmethod
    def taken(self, value: Any) -> Any:
        """Return a value in its own type.

        Raises:
            ValueError: If it is not one of the hyperparameter; the text says what must hold.
        """

    @abstractmethod
    def described(self, path: tuple[str, ...]) -> Parameter:
        """Return the description for samplers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """Varying hyperparameter, as samplers see it.

    Attributes:
        path: The names that lead to it: `("net", "width")`.
        kind: "double", "int" or "categorical".
        low: The least value; None for a choice.
        high: The largest value, inclusive; None for a choice.
        log: Whether its logarithm is uniform.
        choices: The values of a choice.
    """

    path: tuple[str, ...]
    kind: Literal["double", "int", "categorical"]
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The dotted name."""
        return ".".join(self.path)

    def of(self, hparams: Any) -> Any:
        """Return its value among hyperparameters."""
        for name in self.path:
            hparams = hparams[name]
        return hparams

    def index(self, value: Any) -> int:
        """Return which of the choices a value is."""
        return next(i for i, one in enumerate(self.choices) if _is_same(one, value))


@dataclass(frozen=True, slots=True)
class Const(Leaf):
    """Always the same value."""

    value: Any

    @classmethod
    def of(cls, path: str, value: Any) -> Const:
        """Make a constant of a bare value.

        Raises:
            SpaceError: If the value is not JSON.
        """
        _check_json(path, value)
        return cls(deepcopy(value))

    @classmethod
    def parse(cls, path: str, fields: dict[str, Any]) -> Const:
        """Parse `{type: const, val: ...}`.

        Raises:
            SpaceError: If `val` is missing or not JSON.
        """
        _check_fields(path, fields, required=("val",))
        return cls.of(f"{path}.val", fields["val"])

    def sample(self, rng: Rng) -> Any:
        """Return the value; a constant draws nothing."""
        return _fresh(self.value)

    def num_points(self) -> int:
        """Return 1."""
        return 1

    def point(self, index: int) -> Any:
        """Return the value."""
        return _fresh(self.value)

    def at(self, share: float) -> Any:
        """Return the value."""
        return _fresh(self.value)

    def share(self, value: Any) -> float:
        """Return 0."""
        return 0.0

    def taken(self, value: Any) -> Any:
        """Return the value.

        Raises:
            ValueError: If it is another.
        """
        return _choice(value, (self.value,))

    def described(self, path: tuple[str, ...]) -> Parameter:
        """Return the only choice."""
        return Parameter(path=path, kind="categorical", choices=(self.value,))


@dataclass(frozen=True, slots=True)
class Categorical(Leaf):
    """Hyperparameter with a choice of several values."""

    values: tuple[Any, ...]

    @classmethod
    def parse(cls, path: str, fields: dict[str, Any]) -> Categorical:
        """Parse `{type: categorical, vals: [...]}`.

        Raises:
            SpaceError: If `vals` is not a list of at least one JSON value.
        """
        _check_fields(path, fields, required=("vals",))
        values = fields["vals"]
        if not isinstance(values, list) or not values:
            raise SpaceError(
                f"{path}.vals",
                f"`{path}.vals` must be a list of at least one value, but got {values!r}.",
                "write for example `vals: [16, 32, 64]`.",
            )
        for index, value in enumerate(values):
            _check_json(f"{path}.vals[{index}]", value)
        return cls(tuple(values))

    def sample(self, rng: Rng) -> Any:
        """Draw a value; all are equally likely."""
        return _fresh(self.values[rng.integer(0, len(self.values) - 1)])

    def num_points(self) -> int:
        """Return the number of values."""
        return len(self.values)

    def point(self, index: int) -> Any:
        """Return the value at `index`."""
        return _fresh(self.values[index])

    def at(self, share: float) -> Any:
        """Return the value at a share of the choices."""
        return self.point(min(int(share * len(self.values)), len(self.values) - 1))

    def share(self, value: Any) -> float:
        """Return the middle of a value's part."""
        index = next(i for i, one in enumerate(self.values) if _is_same(one, value))
        return (index + 0.5) / len(self.values)

    def taken(self, value: Any) -> Any:
        """Return one of the values.

        Raises:
            ValueError: If it is none of them.
        """
        return _choice(value, self.values)

    def described(self, path: tuple[str, ...]) -> Parameter:
        """Return the choices."""
        return Parameter(path=path, kind="categorical", choices=self.values)


@dataclass(frozen=True, slots=True)
class _Range(Leaf):
    path: str
    minval: Any
    maxval: Any
    count: int | None

    def num_points(self) -> int:
        """Return the count.

        Raises:
            SpaceError: If there is none.
        """
        if self.count is None:
            raise SpaceError(
                f"{self.path}.count",
                f"`{self.path}.count` must be given for a grid search, but it is missing.",
                f"add for example `count: 4` to `{self.path}`.",
            )
        return self.count

    def taken(self, value: Any) -> Any:
        """Return a number of the range.

        Raises:
            ValueError: If it is none, or outside.
        """
        found = self.described(())
        is_int = isinstance(value, int) and not isinstance(value, bool)
        is_kind = is_int or (found.kind == "double" and isinstance(value, float))
        assert found.low is not None
        assert found.high is not None
        # A power may be off by its rounding.
        slack = 1e-12 * abs(value) if is_kind and found.log else 0
        if not is_kind or not found.low - slack <= value <= found.high + slack:
            what = "an integer" if found.kind == "int" else "a number"
            raise ValueError(f"must be {what} from {found.low} to {found.high}, but got {value!r}")
        return value if found.kind == "int" else float(value)


@dataclass(frozen=True, slots=True)
class IntRange(_Range):
    """An integer from `minval` to `maxval`, both inclusive."""

    @classmethod
    def parse(cls, path: str, fields: dict[str, Any]) -> IntRange:
        """Parse `{type: int, minval, maxval, count?}`.

        Raises:
            SpaceError: If a field is missing, unknown or wrong.
        """
        _check_fields(path, fields, required=("minval", "maxval"), optional=("count",))
        for name in ("minval", "maxval"):
            value = fields[name]
            if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _INT_LIMIT:
                raise SpaceError(
                    f"{path}.{name}",
                    f"`{path}.{name}` must be an integer of at most 2**61 in size, "
                    f"but got {value!r}.",
                    "use `type: double` for real numbers.",
                )
        return cls(path, *_check_bounds(path, fields), _parse_count(path, fields))

    def sample(self, rng: Rng) -> int:
        """Draw an integer, all equally likely."""
        return rng.integer(self.minval, self.maxval)

    def num_points(self) -> int:
        """Return the count, or how many integers there are if these are fewer.

        Raises:
            SpaceError: If there is no count.
        """
        num_integers: int = self.maxval - self.minval + 1
        return min(_Range.num_points(self), num_integers)

    def point(self, index: int) -> int:
        """Return the integer nearest to the point of an even spacing, halves away from zero."""
        last = self.num_points() - 1
        if last == 0:
            numerator, denominator = self.minval + self.maxval, 2
        else:
            numerator = self.minval * last + index * (self.maxval - self.minval)
            denominator = last
        rounded: int = (2 * abs(numerator) + denominator) // (2 * denominator)
        return rounded if numerator >= 0 else -rounded

    def at(self, share: float) -> int:
        """Return the integer at a share of the range; all have parts of the same size."""
        number: int = self.maxval - self.minval + 1
        return self.minval + min(int(share * number), number - 1)  # type: ignore[no-any-return]

    def share(self, value: Any) -> float:
        """Return the middle of an integer's part."""
        return float((value - self.minval + 0.5) / (self.maxval - self.minval + 1))

    def described(self, path: tuple[str, ...]) -> Parameter:
        """Return the bounds."""
        return Parameter(path=path, kind="int", low=self.minval, high=self.maxval)


@dataclass(frozen=True, slots=True)
class DoubleRange(_Range):
    """A real number from `minval` (inclusive) to `maxval` (exclusive, but part of a grid)."""

    @classmethod
    def parse(cls, path: str, fields: dict[str, Any]) -> DoubleRange:
        """Parse `{type: double, minval, maxval, count?}`.

        Raises:
            SpaceError: If a field is missing, unknown or wrong.
        """
        _check_fields(path, fields, required=("minval", "maxval"), optional=("count",))
        for name in ("minval", "maxval"):
            _check_number(f"{path}.{name}", fields[name])
        return cls(path, *_check_real_bounds(path, fields), _parse_count(path, fields))

    def sample(self, rng: Rng) -> float:
        """Draw a real number, uniformly."""
        value: float = self.minval + rng.real() * (self.maxval - self.minval)
        return value

    def point(self, index: int) -> float:
        """Return a point of an even spacing; a single point lies in the middle."""
        last = self.num_points() - 1
        if last == 0:
            return float((self.minval + self.maxval) / 2)
        return float(self.minval + index * (self.maxval - self.minval) / last)

    def at(self, share: float) -> float:
        """Return the number at a share of the range."""
        return float(min(self.minval + share * (self.maxval - self.minval), self.maxval))

    def share(self, value: Any) -> float:
        """Return the share of the range below a number."""
        return float(min(max((value - self.minval) / (self.maxval - self.minval), 0.0), 1.0))

    def described(self, path: tuple[str, ...]) -> Parameter:
        """Return the bounds."""
        return Parameter(path=path, kind="double", low=float(self.minval), high=float(self.maxval))


@dataclass(frozen=True, slots=True)
class LogRange(DoubleRange):
    """`base` to a real power from `minval` (inclusive) to `maxval` (exclusive, but on a grid)."""

    base: float

    @classmethod
    def parse(cls, path: str, fields: dict[str, Any]) -> LogRange:
        """Parse `{type: log, base, minval, maxval, count?}`; the bounds are exponents.

        Raises:
            SpaceError: If a field is missing, unknown or wrong.
        """
        _check_fields(path, fields, required=("base", "minval", "maxval"), optional=("count",))
        for name in ("base", "minval", "maxval"):
            _check_number(f"{path}.{name}", fields[name])
        base = fields["base"]
        if base <= 0:
            raise SpaceError(
                f"{path}.base",
                f"`{path}.base` must be greater than 0, but got {base!r}.",
                "10 is the usual base.",
            )
        bounds = _check_real_bounds(path, fields)
        for exponent in bounds:
            _check_power(path, float(base), exponent)
        return cls(path, *bounds, _parse_count(path, fields), float(base))

    def sample(self, rng: Rng) -> float:
        """Draw a number with a uniformly distributed logarithm."""
        return float(self.base ** DoubleRange.sample(self, rng))

    def point(self, index: int) -> float:
        """Return the base to a point of an even spacing of the exponents."""
        return float(self.base ** DoubleRange.point(self, index))

    def at(self, share: float) -> float:
        """Return the number at a share of the range of exponents."""
        return float(self.base ** DoubleRange.at(self, share))

    def share(self, value: Any) -> float:
        """Return the share of the range of exponents below a number's."""
        # All powers of 1 are the same.
        return 0.0 if self.base == 1 else DoubleRange.share(self, math.log(value, self.base))

    def described(self, path: tuple[str, ...]) -> Parameter:
        """Return the bounds as powers."""
        low, high = sorted(self.base**exponent for exponent in (self.minval, self.maxval))
        return Parameter(path=path, kind="double", low=low, high=high, log=True)


def _is_same(one: Any, other: Any) -> bool:
    # True == 1 == 1.0, but a function may take them for three values.
    first, second = (json.dumps(each, sort_keys=True, default=repr) for each in (one, other))
    return first == second


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    for one in choices:
        if _is_same(one, value):
            return _fresh(one)
    raise ValueError(f"must be one of {list(choices)}, but got {value!r}")


def _fresh(value: Any) -> Any:
    # A trial that changes its hyperparameters must not change those of the next one.
    return deepcopy(value) if isinstance(value, dict | list) else value


def _check_fields(
    path: str,
    fields: dict[str, Any],
    *,
    required: tuple[str, ...],
    optional: tuple[str, ...] = (),
) -> None:
    allowed = required + optional
    for name in fields:
        if name not in allowed:
            raise SpaceError(
                f"{path}.{name}",
                f"`{path}` must have no other fields than `type`, "
                f"{', '.join(f'`{field}`' for field in allowed)}, but got {name!r}.",
                f"remove `{name}` or correct its spelling.",
            )
    for name in required:
        if name not in fields:
            raise SpaceError(
                f"{path}.{name}",
                f"`{path}.{name}` must be given, but it is missing.",
                f"add `{name}` to `{path}`.",
            )


def _check_number(path: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A comparison finds NaN and infinities, and integers too large for a float, without overflow.
    if not is_number or not abs(value) <= sys.float_info.max:
        raise SpaceError(
            path,
            f"`{path}` must be a finite number, but got {value!r}.",
            "YAML reads `1e-3` as text; write `1.0e-3` or `0.001`.",
        )


def _check_bounds(path: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    minval, maxval = fields["minval"], fields["maxval"]
    if not minval < maxval:
        raise SpaceError(
            f"{path}.minval",
            f"`{path}.minval` must be less than `{path}.maxval` ({maxval!r}), but got {minval!r}.",
            "exchange the two, or use `type: const` for a single value.",
        )
    return minval, maxval


def _check_real_bounds(path: str, fields: dict[str, Any]) -> tuple[float, float]:
    minval, maxval = _check_bounds(path, fields)
    if not math.isfinite(float(maxval) - float(minval)):
        raise SpaceError(
            f"{path}.maxval",
            f"`{path}.maxval` minus `{path}.minval` must be a finite number, "
            f"but got {maxval!r} and {minval!r}.",
            "use `type: log` for values of very different size.",
        )
    return minval, maxval


def _check_power(path: str, base: float, exponent: float) -> None:
    try:
        is_usable = base**exponent > 0
    except OverflowError:
        is_usable = False
    if not is_usable:
        raise SpaceError(
            path,
            f"`{path}` must stay a positive, finite number, but got {base!r} ** {exponent!r}.",
            "`minval` and `maxval` are exponents: -5 with base 10 stands for 0.00001.",
        )


def _parse_count(path: str, fields: dict[str, Any]) -> int | None:
    count = fields.get("count")
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise SpaceError(
            f"{path}.count",
            f"`{path}.count` must be an integer of at least 1 or null, but got {count!r}.",
            "it is the number of grid points; leave it out for other searches.",
        )
    return count


def _check_json(path: str, value: Any) -> None:
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(f"{path}[{index}]", item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise SpaceError(
                    path,
                    f"The names in `{path}` must be strings, but got {name!r}.",
                    "put the name in quotes.",
                )
            _check_json(f"{path}.{name}", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise SpaceError(
            path,
            f"`{path}` must be a value that JSON knows, but got {value!r}.",
            'write it as text, as in "inf", and convert it with `float()` in the script.',
        )
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise SpaceError(
            path,
            f"`{path}` must be a value that JSON knows, but got {value!r} of type "
            f"{type(value).__name__}.",
            "use text, numbers, booleans, null, lists and maps; quote dates.",
        )
