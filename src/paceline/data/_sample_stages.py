"""What is done to samples once they are read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from paceline._errors import add_note


class Stage(ABC):
    """A step between what is read and what a user gets; the number of samples stays."""

    @abstractmethod
    def apply(self, samples: Any, numbers: Sequence[int] | None = None) -> Any:
        """Return the samples that become of some that were fetched together.

        Args:
            samples: The samples.
            numbers: Their numbers, for errors.
        """


class MapSamplesStage(Stage):
    """A function of a sample."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def apply(self, samples: Any, numbers: Sequence[int] | None = None) -> list[Any]:
        """Return what the function makes of each sample."""
        made: list[Any] = []
        try:
            for sample in samples:
                made.append(self._function(sample))
        except Exception as error:
            if numbers is not None and len(made) < len(numbers):
                add_note(error, f"While reading sample {numbers[len(made)]}, in `map`.")
            raise
        return made


class MapBatchesStage(Stage):
    """A function of the samples that are fetched together."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def apply(self, samples: Any, numbers: Sequence[int] | None = None) -> Any:
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
