"""Which ranks wait for others in vain; reads no clock, and does no I/O."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.workers._errors import CollectiveMismatchError, WorkerFailedError
from paceline.workers.pools._thread_progress import Progress

# Ranks pair up in these, so their numbers and kinds may differ.
_PAIRED = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list")

# Exchanges over the store of the ranks begin so.
_STORE = "distributed."

# How long a rank waits for one that has returned until that is taken for an error.
_CERTAIN_S = 5.0
# When those that wait for others are told of first, and how much later each time from then on.
_NOTICE_S = 60.0
_NOTICE_FACTOR = 4
# Of so many missing ranks a message says where they are; the log says it of all.
_MOST_PLACES = 3


class WatchedRank(NamedTuple):
    """Last observation of a rank that takes part in a call."""

    rank: int
    has_returned: bool
    progress: Progress


class DetectedHang(NamedTuple):
    """That ranks wait in vain.

    `is_certain` says that no patience would help, as the program itself does not fit together;
    `rank` is the first that is missing, else the first that waits.
    """

    text: str
    rank: int
    is_certain: bool


class HangWatch:
    """Decides whether workers end because ranks wait in vain, and tells of long waits before.

    Args:
        heartbeat_timeout_s: How long a worker may give no sign of life, in seconds.
        collective_timeout_s: How long ranks may wait for others, in seconds.
        stacks_are: Where the stacks of all ranks are then.
    """

    def __init__(
        self,
        heartbeat_timeout_s: float,
        collective_timeout_s: float,
        stacks_are: str = "in the output above",
    ) -> None:
        self._certain_s = min(_CERTAIN_S, heartbeat_timeout_s)
        self._timeout_s = collective_timeout_s
        self._stacks_are = stacks_are
        self._notice_s = _NOTICE_S

    def look(self, calls: Iterable[Sequence[WatchedRank]]) -> Exception | None:
        """Return the error that ends all workers, from the observations of each call's ranks."""
        hang = self._hang(calls, self._timeout_s)
        if hang is None:
            return None
        text = f"{hang.text} The stacks of all ranks are {self._stacks_are}."
        if hang.is_certain:
            hint = "Hint: all ranks must make the same calls in the same order."
            return CollectiveMismatchError(f"{text} {hint}")
        return WorkerFailedError(text, hang.rank)

    def notice(self, calls: Sequence[Sequence[WatchedRank]]) -> str | None:
        """Return who waits for whom in a collective operation for long, now and then."""
        if self._hang(calls, _NOTICE_S) is None:
            # It went on.
            self._notice_s = _NOTICE_S
            return None
        hang = self._hang(calls, self._notice_s)
        if hang is None or self._notice_s >= self._timeout_s:
            return None
        self._notice_s *= _NOTICE_FACTOR
        return f"{hang.text} The workers are ended if that lasts {self._timeout_s:g} s."

    def _hang(
        self, calls: Iterable[Sequence[WatchedRank]], timeout_s: float
    ) -> DetectedHang | None:
        hangs = (detect_hang(ranks, self._certain_s, timeout_s) for ranks in calls)
        return next((hang for hang in hangs if hang is not None), None)


def detect_hang(
    observations: Sequence[WatchedRank], certain_s: float, timeout_s: float
) -> DetectedHang | None:
    """Return whether ranks of a call wait for others in vain.

    Args:
        observations: All ranks of the call.
        certain_s: How long a rank must have waited, in seconds, if those it waits for have
            returned already or are in another operation.
        timeout_s: How long it must have waited otherwise.
    """
    waiting = [o for o in observations if _waits_for_others(o, certain_s)]
    if not waiting or len(observations) < 2:
        return None
    in_store = [o for o in waiting if o.progress.operation.startswith(_STORE)]
    if in_store:
        hang = _hang_in_store(in_store, waiting, observations)
        waiting = [o for o in waiting if o not in in_store]
        if hang is not None or not waiting:
            return hang
    most = max(o.progress.num_collectives for o in waiting)
    waiting = [o for o in waiting if o.progress.num_collectives == most]
    others = [o for o in observations if o not in waiting]
    missing = [o for o in others if 0 <= o.progress.num_collectives < most]
    returned = [o for o in missing if o.has_returned]
    if returned:
        noun = _ranks(returned, "has returned", "have returned")
        return _detected_hang(waiting, f"{noun} without", returned, is_certain=True)
    if not others and len({o.progress.operation for o in waiting}) > 1:
        return _detected_hang(waiting, "these must be the same", [], is_certain=True)
    late = [o for o in waiting if o.progress.stuck_s >= timeout_s]
    if late and missing:
        noun = _ranks(missing, "has not come", "have not come")
        return _detected_hang(waiting, f"{noun} there", missing, is_certain=False)
    waiting = late
    if waiting and not any(o not in waiting and not o.has_returned for o in observations):
        return _detected_hang(waiting, "none of them goes on", [], is_certain=False)
    return None


def _hang_in_store(
    in_store: Sequence[WatchedRank],
    waiting: Sequence[WatchedRank],
    observations: Sequence[WatchedRank],
) -> DetectedHang | None:
    """Return whether ranks wait in the store for others that do so elsewhere, or have returned.

    The store itself names ranks that are there in different calls.
    """
    others = [o for o in observations if o not in waiting]
    if not others and len(in_store) < len(waiting):
        return _detected_hang(waiting, "these must be the same", [], is_certain=True)
    if others and len(in_store) == len(waiting) and all(o.has_returned for o in others):
        noun = _ranks(others, "has returned", "have returned")
        return _detected_hang(in_store, f"{noun} without", others, is_certain=True)
    return None


def _waits_for_others(observation: WatchedRank, least_s: float) -> bool:
    progress = observation.progress
    return (
        not observation.has_returned
        and progress.is_waiting
        and progress.stuck_s >= least_s
        and progress.operation not in ("", *_PAIRED)
    )


def _detected_hang(
    waiting: Sequence[WatchedRank],
    what: str,
    missing: Sequence[WatchedRank],
    *,
    is_certain: bool,
) -> DetectedHang:
    by_operation: dict[str, list[WatchedRank]] = {}
    for observation in waiting:
        by_operation.setdefault(observation.progress.operation, []).append(observation)
    waits = " and ".join(
        f"{_ranks(group, 'waits', 'wait')} in `{operation}` ({group[0].progress.place})"
        for operation, group in by_operation.items()
    )
    seconds = min(o.progress.stuck_s for o in waiting)
    text = f"{waits} for {seconds:.3g} s, but {what}."
    if missing:
        text += f" Missing ranks: {', '.join(str(o.rank) for o in missing)}."
        late = [o for o in missing if not o.has_returned and o.progress.place]
        for observation in late[:_MOST_PLACES]:
            text += f" Rank {observation.rank} is at {observation.progress.place}."
    first = (missing or waiting)[0]
    return DetectedHang(text[0].upper() + text[1:], first.rank, is_certain)


def _ranks(group: Sequence[WatchedRank], one: str, several: str) -> str:
    numbers = [str(observation.rank) for observation in group]
    if len(numbers) == 1:
        return f"rank {numbers[0]} {one}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]} {several}"
