"""A call as it travels: in one frame, with large data beside it in shared memory.

Workers that do not reach the driver's memory, such as those of other nodes, ask for the data.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.workers.pools._pickled_buffers import Buffer
from paceline.workers.pools._pickling import dump, load, load_with_buffers
from paceline.workers.pools._shared_buffer_cache import SharedBuffers, Span
from paceline.workers.pools._shared_memory_segment import (
    SharedSegment,
    SharedSegmentPlace,
    map_shared_segment,
)
from paceline.workers.pools._worker_call import WorkerCall

# Less than this is quicker in the frame.
_LEAST_SHARED_BYTES = 1024 * 1024
# The segment of what is in the frame itself.
_IN_FRAME = -1


class PackedCall(NamedTuple):
    """A call on its way.

    Attributes:
        head: What the frame has.
        segments: The rest, which stays in shared memory as long as this object.
    """

    head: bytes
    segments: Sequence[SharedSegment] = ()


class _Head(NamedTuple):
    """What workers are told first.

    Attributes:
        facts: The driver's state, pickled.
        stream: Where the pickled call is.
        spans: Where the buffers beside it are.
        places: The segments.
        data: What is in no segment.
    """

    facts: bytes
    stream: Span
    spans: list[Span]
    places: list[SharedSegmentPlace]
    data: bytearray


def pack_worker_call(facts: Any, call: WorkerCall, shared: SharedBuffers) -> PackedCall:
    """Return a call as it travels to workers.

    Args:
        facts: The driver's state, which workers load first.
        call: The call.
        shared: Where its large data go.

    Raises:
        NotSendableError: The function or an argument cannot be pickled.
    """
    file, stream = io.BytesIO(), io.BytesIO()
    buffers: list[Buffer] = []
    dump(facts, file, what="The driver's state", name="driver")
    dump(call, stream, what="The call", name="", buffers=buffers)
    segments: list[SharedSegment] = []
    data = bytearray()
    # Apart from each other, as the stream is new each time.
    spans = _placed_buffers(buffers, shared, segments, data)
    (place,) = _placed_buffers([Buffer(stream.getbuffer(), stream)], shared, segments, data)
    head = _Head(file.getvalue(), place, spans, [each.place for each in segments], data)
    return PackedCall(pickle.dumps(head, pickle.HIGHEST_PROTOCOL), segments)


def _placed_buffers(
    buffers: Sequence[Buffer], shared: SharedBuffers, segments: list[SharedSegment], data: bytearray
) -> list[Span]:
    """Add buffers to the segments of a call, or to the data of its frame."""
    found = None
    if sum(buffer.view.nbytes for buffer in buffers) >= _LEAST_SHARED_BYTES:
        found = shared.share(buffers)
    if found is not None:
        first = len(segments)
        segments += found[0]
        return [span._replace(segment=first + span.segment) for span in found[1]]
    spans = []
    for view, _ in buffers:
        spans.append(Span(_IN_FRAME, len(data), view.nbytes, view.readonly))
        data += view
    return spans


class ReceivedCall:
    """A call that has arrived; `facts` must be loaded and heeded before `call`.

    Args:
        head: What the frame had.
        fetch: Gets the content of so many segments from the driver, if they are not on this
            machine.
    """

    def __init__(
        self, head: bytes | bytearray, fetch: Callable[[int], Sequence[memoryview]]
    ) -> None:
        self._head: _Head = pickle.loads(head)  # noqa: S301 - written by this worker's own driver
        places = self._head.places
        mapped = [view for view in map(map_shared_segment, places) if view is not None]
        contents = mapped if len(mapped) == len(places) else fetch(len(places))
        self._contents = [*contents, memoryview(self._head.data)]

    def facts(self) -> Any:
        """Return the driver's state."""
        return load(io.BytesIO(self._head.facts))

    def call(self) -> WorkerCall:
        """Return the call."""
        stream, buffers = self._at(self._head.stream), map(self._at, self._head.spans)
        call: WorkerCall = load_with_buffers(stream, buffers)
        return call

    def _at(self, span: Span) -> memoryview:
        view = self._contents[span.segment][span.offset : span.offset + span.num_bytes]
        return view.toreadonly() if span.is_readonly else view
