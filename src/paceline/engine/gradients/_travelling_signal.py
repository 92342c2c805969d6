"""A number that the ranks tell each other along with the gradients."""

import time
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

# Reading a number from a GPU would make the host wait for the step that computes it. Read so many
# steps later it is there already.
_LAG_ON_GPU = 8

# A sum of its own takes half a millisecond of processor time. So it is not made at each step, but
# after half a second, so many steps, or an eighth of the steps so far, whichever comes first.
_PERIOD_S = 0.5
_LONGEST_PERIOD = 50
_MIN_STEPS_PER_PERIOD = 8


class _Sum(NamedTuple):
    """A sum that is to be read at a step; `begun_at` is the step at which it travelled alone."""

    read_at: int
    total: torch.Tensor
    event: torch.cuda.Event | None
    begun_at: int | None


class TravellingSignal:
    """Signal of this rank to the others, sent with the next reduction, and the result.

    Every rank hears the sum after the same optimizer step: on a CPU at once, on a GPU `lag` steps
    later. Where a step has no gradients to sum, a sum of its own is made from time to time. It is
    waited for one step later, so that no rank stops for it.

    Args:
        device: Where the sums arrive.
        lag: After how many further steps a sum is read; by default what suits the device.
    """

    def __init__(self, device: torch.device, lag: int | None = None) -> None:
        self._is_cuda = device.type == "cuda"
        self._lag = lag if lag is not None else _LAG_ON_GPU if self._is_cuda else 0
        self._told = 0.0
        self._heard = 0.0
        self._num_steps = 0
        self._on_their_way: deque[_Sum] = deque()
        self._spare: list[torch.Tensor] = []
        self._being_summed: tuple[torch.Tensor, dist.Work] | None = None
        # The step at which the next sum of its own begins; None while the last one does not tell.
        self._next_alone: int | None = 0
        self._clock = _StepClock()

    def tell(self, value: float) -> None:
        """Set what this rank says with the next reduction, whenever that is."""
        self._told = value

    def take(self) -> float:
        """Return what this rank says, once."""
        told, self._told = self._told, 0.0
        return told

    def travel_alone(self, device: torch.device, *, is_awaited: bool = False) -> None:
        """Sum what all ranks say, if it is time, without gradients.

        All ranks call it at the same steps. With each sum the chief tells after how many steps the
        next one begins, so that all begin it at the same one.

        Args:
            device: Where the process group communicates.
            is_awaited: Whether the sum is heard after this call, however far away the next one is.
        """
        if self._being_summed is not None:
            total, work = self._being_summed
            self._being_summed = None
            work.wait()
            self._expect(total, begun_at=self._num_steps)
        self._pass_step()
        if self._next_alone is not None and self._num_steps >= self._next_alone:
            self._next_alone = None
            words = torch.zeros(2, device=device)
            words[0] = self.take()
            if dist.get_rank() == 0:
                words[1] = self._clock.period(self._num_steps)
            work = dist.all_reduce(words, async_op=True)
            assert work is not None
            if is_awaited:
                work.wait()
                self._take_in(words, self._num_steps)
            else:
                self._being_summed = words, work

    def receive(self, total: torch.Tensor) -> None:
        """Take in the sum of a reduction, a 0-d tensor."""
        self._expect(total)
        self._pass_step()

    def hear(self) -> float:
        """Return what all ranks told since the last call, the same on every rank."""
        heard, self._heard = self._heard, 0.0
        return heard

    def _expect(self, total: torch.Tensor, begun_at: int | None = None) -> None:
        """Read a sum when the next step has passed, and the lag."""
        event, read_at = None, self._num_steps + 1 + self._lag
        if self._lag:
            copy = self._spare.pop() if self._spare and begun_at is None else self._copy_for(total)
            copy.copy_(total, non_blocking=True)
            total = copy
            if self._is_cuda:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
                event.record()
        self._on_their_way.append(_Sum(read_at, total, event, begun_at))

    def _pass_step(self) -> None:
        self._num_steps += 1
        while self._on_their_way and self._on_their_way[0].read_at <= self._num_steps:
            _, total, event, begun_at = self._on_their_way.popleft()
            if event is not None:
                event.synchronize()
            if begun_at is None:
                self._heard += float(total)
                if self._lag:
                    self._spare.append(total)
            else:
                self._take_in(total, begun_at)

    def _take_in(self, words: torch.Tensor, begun_at: int) -> None:
        """Hear a sum that travelled alone, and until when the next one waits."""
        told, period = words.tolist()
        self._heard += told
        self._next_alone = begun_at + int(period)

    def _copy_for(self, total: torch.Tensor) -> torch.Tensor:
        return torch.zeros(total.shape, pin_memory=self._is_cuda)


class _StepClock:
    """Know after how many steps ranks shall tell each other something again."""

    def __init__(self) -> None:
        self._step = 0
        self._time_s = time.monotonic()

    def period(self, step: int) -> int:
        """Return the number of steps; called on the chief at each sum."""
        now = time.monotonic()
        num_steps, seconds = step - self._step, max(now - self._time_s, 1e-6)
        self._step, self._time_s = step, now
        in_time = int(num_steps * _PERIOD_S / seconds)
        return max(1, min(in_time, _LONGEST_PERIOD, step // _MIN_STEPS_PER_PERIOD))
