"""The random stream of a search."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.random import RandomState

_MAX_SEED = 2**32 - 1
_TRIAL_SEEDS = 2**31
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
        """Draw an integer from `low` to `high`, both inclusive; one choice draws nothing."""
        return low + int(self._state.randint(0, high - low + 1)) if high > low else low

    def request_id(self) -> str:
        """Draw a version-4 UUID, which names a trial before the master has numbered it."""
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
    def from_snapshot(cls, snapshot: dict[str, Any]) -> Rng:
        """Continue a stream where `snapshot` left it.

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
