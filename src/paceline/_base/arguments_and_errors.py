"""Checks of arguments, quantities as people write them, random numbers."""

import math
import re
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

# Returns the value to keep, or raises an error that names the argument.
Check = Callable[[str, Any], Any]


def wrong(name: str, must: str, value: Any, hint: str = "") -> str:
    """Return the text of an error about an argument."""
    shown = value.__name__ if isinstance(value, type) else repr(value)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
    return f"`{name}` must be {must}, but got {shown}." + (f" Hint: {hint}" if hint else "")


# Kinds of wrong values that pydantic names, in this project's words.
_WRONG_VALUES = {
    "missing": "must be given",
    "extra_forbidden": "is no known field",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "value_error": "is wrong: {error}",
}


def wrong_value_text(problem: Mapping[str, Any]) -> str:
    """Return the text about a wrong value, from an entry of pydantic's `ValidationError.errors`."""
    kind = problem["type"]
    if kind not in _WRONG_VALUES:
        return f"is wrong: {problem['msg']}"
    limits = problem.get("ctx", {}).items()
    shown = {name: f"{one:g}" if isinstance(one, float) else one for name, one in limits}
    text = _WRONG_VALUES[kind].format(**shown).rstrip(".")
    if kind in ("missing", "extra_forbidden", "value_error"):
        return text
    value = repr(problem["input"])
    return f"{text}, but got {value if len(value) <= 200 else f'{value[:200]}...'}"


def check_count(name: str, value: object, least: int = 1) -> None:
    """Check an argument: an integer of at least `least`.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(wrong(name, f"an integer of at least {least}", value))


def check_function(name: str, value: object) -> None:
    """Check an argument: a callable.

    Raises:
        TypeError: It cannot.
    """
    if not callable(value):
        raise TypeError(wrong(name, "a function", value))


def check_dictionary(name: str, value: object, error: type[Exception] = TypeError) -> None:
    """Check an argument: a dictionary or None.

    Raises:
        TypeError: It is none, or another error if that is given.
    """
    if value is not None and not isinstance(value, Mapping):
        raise error(f"`{name}` must be a dictionary, but got {type(value).__name__}.")


def optional(check: Check) -> Check:
    """Return a check accepting None as well."""
    return lambda name, value: None if value is None else check(name, value)


def boolean(name: str, value: Any) -> bool:
    """Return a bool.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(wrong(name, "True or False", value))
    return value


def integer(name: str, value: Any) -> int:
    """Return an integer.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(wrong(name, "an integer", value))
    return value


def count(minimum: int) -> Check:
    """Return a check for integers from a minimum on."""

    def check(name: str, value: Any) -> int:
        if integer(name, value) < minimum:
            raise ValueError(wrong(name, f"at least {minimum}", value))
        return int(value)

    return check


def number(name: str, value: Any) -> float:
    """Return a finite number as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(wrong(name, "a number", value))
    if not math.isfinite(value):
        raise ValueError(wrong(name, "a finite number", value))
    return float(value)


def positive(name: str, value: Any) -> float:
    """Return a number above 0.

    Raises:
        TypeError: It is no number.
        ValueError: It is 0, negative or not finite.
    """
    if number(name, value) <= 0:
        raise ValueError(wrong(name, "above 0", value))
    return float(value)


def one_of(*allowed: Any) -> Check:
    """Return a check accepting only the allowed values."""

    def check(name: str, value: Any) -> Any:
        if value not in allowed:
            raise ValueError(wrong(name, f"one of {', '.join(map(repr, allowed))}", value))
        return value

    return check


def text(name: str, value: Any) -> str:
    """Return a non-empty text argument, for example a name or a path.

    Raises:
        TypeError: It is no text.
        ValueError: It is empty.
    """
    if hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if not isinstance(value, str):
        raise TypeError(wrong(name, "text", value))
    if not value:
        raise ValueError(wrong(name, "text that is not empty", value))
    return value


def ranks_to_check(name: str, value: Any) -> bool | tuple[str, ...]:
    """Return whether to compare ranks, or the names of the tensors private to each rank.

    Raises:
        TypeError: It is neither a bool nor names.
    """
    if isinstance(value, bool):
        return value
    names = value if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(each, str) for each in names):
        raise TypeError(wrong(name, "True, False or names of tensors", value))
    return tuple(names)


_BYTES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")
# Larger integers are not exact in programs that read JSON numbers as floats.
_MAX = 2**53 - 1

SIZE_PATTERN = rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(_BYTES)})$"
AGE_PATTERN = rf"^[0-9]+(\.[0-9]+)? ?({'|'.join(_SECONDS)})$"
SIZE_FORMS = 'an integer of bytes, or text such as "20GB" or "512MiB"'
AGE_FORMS = 'seconds, or text such as "7d", "12h" or "30min"'


def bytes_of(value: object) -> int | None:
    """Return a size in bytes, None if the value is none.

    Args:
        value: An integer of at least 1, or a number with B, KB (1000 bytes), KiB (1024 bytes) and
            so on.
    """
    number = _number(value, _BYTES) if not isinstance(value, float) else None
    return None if number is None or number < 1 else int(number)


def seconds_of(value: object, *, may_be_zero: bool = False) -> float | None:
    """Return a time in seconds, None if the value is none.

    Args:
        value: A number above 0, or one with s, m or min, h, d or w.
        may_be_zero: Whether 0 is a time, as for an age.
    """
    number = _number(value, _SECONDS)
    if number is None or number < 0 or (number == 0 and not may_be_zero):
        return None
    return float(number)


def _number(value: object, units: dict[str, int]) -> float | None:
    if isinstance(value, str):
        found = _QUANTITY.fullmatch(value.strip())
        if found is None or found[2] not in units:
            return None
        value = float(found[1]) * units[found[2]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if value <= _MAX else None


# Python's integers have no limit: the mask makes the arithmetic that of 64 bits.
_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """Return a 63-bit seed from several integers (the finaliser of SplitMix64, chained).

    Neighbouring inputs give unrelated seeds, unlike a sum.
    """
    state = 0
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


_MAX_SEED = 2**32 - 1
_TRIAL_SEEDS = 2**31
# The state of a Mersenne Twister.
_NUM_WORDS = 624


class Rng:
    """Draw from the stream of `numpy.random.RandomState(seed)`, a Mersenne Twister.

    NumPy has frozen this stream, so that a seed gives the same search in every later version.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        """Start the stream.

        Raises:
            ValueError: If the seed is not an integer from 0 to 2**32 - 1.
        """
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
            raise ValueError(
                f"`seed` must be an integer from 0 to {_MAX_SEED}, but got {seed!r}.\n"
                "Hint: set `reproducibility.experiment_seed` to such a number or leave it out."
            )
        # NumPy takes a tenth of a second to load, and most users of the package never draw.
        from numpy.random import RandomState

        self._state: RandomState = RandomState(seed)

    def real(self) -> float:
        """Draw a float from 0 (inclusive) to 1 (exclusive)."""
        return float(self._state.random_sample())

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from `low` to `high` inclusive; equal bounds draw nothing."""
        return low + int(self._state.randint(0, high - low + 1)) if high > low else low

    def request_id(self) -> str:
        """Draw a version-4 UUID naming a trial before the master assigns a number."""
        return str(uuid.UUID(bytes=self._state.bytes(16), version=4))

    def trial_seed(self) -> int:
        """Draw a trial's own seed, from 0 to 2**31 - 1."""
        return int(self._state.randint(_TRIAL_SEEDS))

    def snapshot(self) -> dict[str, Any]:
        """Return the stream's position as JSON-able data."""
        state: Any = self._state.get_state(legacy=False)
        return {
            "algorithm": "mt19937",
            "words": [int(word) for word in state["state"]["key"]],
            "position": int(state["state"]["pos"]),
        }

    @classmethod
    def from_snapshot(cls, snapshot: dict[str, Any]) -> "Rng":
        """Return a stream continuing at the position of `snapshot`.

        Raises:
            ValueError: If the data is not a snapshot of this kind of stream.
        """
        words = snapshot.get("words")
        if snapshot.get("algorithm") != "mt19937" or len(words or ()) != _NUM_WORDS:
            raise ValueError(
                "A random stream's snapshot must hold the `mt19937` algorithm and its "
                f"{_NUM_WORDS} words, but got {snapshot.get('algorithm')!r} and "
                f"{len(words or ())} words.\n"
                "Hint: restore from a snapshot that `Rng.snapshot()` made."
            )
        from numpy import array, uint32

        rng = cls(0)
        position = int(snapshot["position"])
        rng._state.set_state(("MT19937", array(words, dtype=uint32), position, 0, 0.0))
        return rng
