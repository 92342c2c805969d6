"""What is done to samples once they are read, and a source of what becomes of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline._errors import add_note
from paceline.data._sample_source import Source


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


class StagedSource(Source):
    """The samples of a source with what is done to them, such as for a filter."""

    def __init__(self, source: Source, stages: tuple[Stage, ...]) -> None:
        self.name = source.name
        self._source = source
        self._stages = stages

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, numbers: Sequence[int]) -> Any:
        samples = self._source.fetch(numbers)
        for stage in self._stages:
            samples = stage.apply(samples, numbers)
        return samples

    def chunk_sizes(self) -> Any:
        return self._source.chunk_sizes()

    def window(self) -> int:
        return self._source.window()

    def expect(self, now: Any, later: Any) -> None:
        self._source.expect(now, later)

    def identity(self) -> Mapping[str, Any] | None:
        return self._source.identity()
