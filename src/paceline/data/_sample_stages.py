"""What is done to samples once they are read."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Stage(ABC):
    """A step between what is read and what a user gets; the number of samples stays."""

    @abstractmethod
    def apply(self, samples: Any) -> Any:
        """Return the samples that become of some that were fetched together."""


class Mapped(Stage):
    """A function of a sample."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def apply(self, samples: Any) -> list[Any]:
        """Return what the function makes of each sample."""
        return [self._function(sample) for sample in samples]


class MappedBatches(Stage):
    """A function of the samples that are fetched together."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def apply(self, samples: Any) -> Any:
        """Return what the function makes of them.

        Raises:
            TypeError: It returns something else.
            ValueError: It returns another number of samples.
        """
        plain = getattr(samples, "plain", None)
        if plain is None:
            changed = self._function(samples)
            if not hasattr(changed, "__len__"):
                raise TypeError(
                    "The function of `map_batches` must return a list of samples, but returned"
                    f" {type(changed).__name__}."
                )
        else:
            changed = samples.changed_to(self._function(plain()))
        if len(changed) != len(samples):
            raise ValueError(
                "The function of `map_batches` must return as many samples as it gets, but got"
                f" {len(samples)} and returned {len(changed)}. Hint: `filter` leaves samples out."
            )
        return changed
