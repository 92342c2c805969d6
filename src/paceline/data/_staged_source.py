"""A source of samples that stages have changed, for what comes after these stages."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.data._sample_source import Source
from paceline.data._sample_stages import Stage


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
