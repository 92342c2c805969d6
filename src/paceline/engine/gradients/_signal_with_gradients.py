"""A number that the ranks tell each other along with the gradients."""

from collections import deque

import torch
import torch.distributed as dist

# Reading a number from a GPU would make the host wait for the step that computes it. Read so many
# steps later it is there already.
_LAG_ON_GPU = 8


class TravellingSignal:
    """Signal of this rank to the others, sent with the next reduction, and the result.

    Every rank hears the sum after the same optimizer step: on a CPU at once, on a GPU `lag` steps
    later. A sum that travels without gradients is waited for one step later still, so that no rank
    stops for it.

    Args:
        device: Where the sums arrive.
        lag: After how many further steps a sum is read; by default what suits the device.
    """

    def __init__(self, device: torch.device, lag: int | None = None) -> None:
        self._is_cuda = device.type == "cuda"
        self._lag = lag if lag is not None else _LAG_ON_GPU if self._is_cuda else 0
        self._told = 0.0
        self._heard = 0.0
        self._on_their_way: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._spare: list[torch.Tensor] = []
        self._being_summed: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def tell(self, value: float) -> None:
        """Set what this rank says with the next reduction, whenever that is."""
        self._told = value

    def take(self) -> float:
        """Return what this rank says, once."""
        told, self._told = self._told, 0.0
        return told

    def travel_alone(self, device: torch.device) -> None:
        """Sum what all ranks say, without gradients and without waiting; all ranks call it."""
        total = torch.full((), self.take(), device=device)
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        self._being_summed.append((total, work))
        if len(self._being_summed) > 1:
            total, work = self._being_summed.popleft()
            work.wait()
            self.receive(total)

    def receive(self, total: torch.Tensor) -> None:
        """Take in the sum of a reduction, a 0-d tensor."""
        if not self._lag:
            self._heard += float(total)
            return
        copy = self._spare.pop() if self._spare else self._make_copy()
        copy.copy_(total, non_blocking=True)
        event = None
        if self._is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            event.record()
        self._on_their_way.append((copy, event))
        if len(self._on_their_way) > self._lag:
            arrived, event = self._on_their_way.popleft()
            if event is not None:
                event.synchronize()
            self._heard += float(arrived)
            self._spare.append(arrived)

    def hear(self) -> float:
        """Return what all ranks told since the last call, the same on every rank."""
        heard, self._heard = self._heard, 0.0
        return heard

    def _make_copy(self) -> torch.Tensor:
        return torch.zeros((), pin_memory=self._is_cuda)
