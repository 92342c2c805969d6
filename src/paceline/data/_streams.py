"""Samples that come one after the other and have no numbers."""

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from paceline.data._stream_pieces import StreamPieces, stream_pieces

logger = logging.getLogger(__name__)

_FETCHED_TOGETHER = 256


class Stream:
    """An iterable with what is done to its samples on their way.

    Args:
        data: An iterable; an iterable torch data set keeps its place in a checkpoint if it has
            `state_dict`.
        steps: What is done, in order.
    """

    def __init__(self, data: Iterable[Any], steps: tuple["StreamStep", ...] = ()) -> None:
        self.data = data
        self.steps = steps
        self.name = f"the {type(data).__name__}"
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun and isinstance(self.data, Iterator):
            logger.warning(
                "The samples of %s are there once, and this is another epoch of it: what was read"
                " before is not read again. Hint: an object whose `__iter__` begins anew.",
                self.name,
            )
        self._has_begun = True
        return _run_steps(self.data, self.steps)

    def then(self, step: "StreamStep") -> "Stream":
        """Return the stream with one more step."""
        return Stream(self.data, (*self.steps, step))

    def pieces(self) -> StreamPieces | None:
        """Return the stream in pieces, or None if it can only be read whole."""
        pieces = stream_pieces(self.data)
        return pieces and _SteppedPieces(pieces, self.steps)

    @property
    def holds_samples(self) -> bool:
        """Whether a step has read samples that it did not give out yet."""
        return any(step.holds_samples for step in self.steps)


def _run_steps(data: Iterable[Any], steps: tuple["StreamStep", ...]) -> Iterator[Any]:
    samples = iter(data)
    for step in steps:
        samples = step(samples)
    return samples


class _SteppedPieces(StreamPieces):
    """Pieces with what is done to the samples of each of them."""

    def __init__(self, pieces: StreamPieces, steps: tuple["StreamStep", ...]) -> None:
        self.num_pieces, self.name = pieces.num_pieces, pieces.name
        self.is_shuffled = pieces.is_shuffled or any(type(s) is MixingStreamStep for s in steps)
        self._pieces = pieces
        self._steps = steps

    def read(self, piece: int, epoch: int) -> Iterable[Any]:
        return _run_steps(self._pieces.read(piece, epoch), self._steps)


class StreamStep:
    """What is done to the samples of a stream."""

    holds_samples = False

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return what becomes of samples."""
        raise NotImplementedError


class MappingStreamStep(StreamStep):
    """A function of each sample."""

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return what the function makes of them."""
        return map(self._function, samples)


class FilterStreamStep(StreamStep):
    """Leaves samples out."""

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return those for which the function is true."""
        return filter(self._function, samples)


class BatchStreamStep(StreamStep):
    """A function of some samples at once."""

    holds_samples = True

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return what the function makes of them."""
        while batch := list(islice(samples, _FETCHED_TOGETHER)):
            yield from self._function(batch)


class MixingStreamStep(StreamStep):
    """A buffer from which samples are drawn at random.

    Args:
        size: The samples in the buffer.
    """

    holds_samples = True

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the samples in another order, by the process's own generator."""
        buffer = list(islice(samples, self._size))
        for sample in samples:
            place = random.randrange(len(buffer))  # noqa: S311
            buffer[place], sample = sample, buffer[place]
            yield sample
        random.shuffle(buffer)
        yield from buffer


class StreamPartStep(StreamStep):
    """Every so many samples.

    Args:
        rank: The first of them.
        num_parts: How many parts there are.
    """

    def __init__(self, rank: int, num_parts: int) -> None:
        self._rank = rank
        self._num_parts = num_parts

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the samples of the part."""
        return islice(samples, self._rank, None, self._num_parts)
