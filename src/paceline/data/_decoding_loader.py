"""A loader whose batches are decoded ahead by threads of the process that trains."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from paceline.data._encoded_images import ImageBatchMemory, decoded_batch, decoded_sample
from paceline.data._sample_source import Source

_MOST_THREADS = 4


class DecodingLoader(DataLoader[Any]):
    """A loader of samples that have to be decoded.

    Without processes of its own, threads decode the next batches. The stages of the data set and
    a user's `collate` run in the thread that iterates, in the order of the batches: they may draw
    at random. With processes, it is torch's.

    Args:
        dataset: The view of the data set.
        source: Its samples.
        finish: Makes a batch of decoded samples; None for `collate_samples`.
        options: Those of a `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        source: Source,
        finish: Callable[[list[Any]], Any] | None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, **options)
        self._source = source
        self._finish = finish

    def __iter__(self) -> Any:
        if self.num_workers or self.batch_sampler is None:
            return super().__iter__()
        return self._decode_ahead()

    def _decode_ahead(self) -> Iterator[Any]:
        # As torch's own iterator does: what is drawn afterwards stays the same.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        is_pinned = self.pin_memory and torch.cuda.is_available()
        num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="paceline-decode")
        # Those that are decoded, and two that the loop over the batches has in its hands.
        memory = ImageBatchMemory(num_threads + 2)
        under_way: deque[Future[Any]] = deque()
        batches = iter(self._index_sampler)
        try:
            for numbers in islice(batches, num_threads):
                under_way.append(pool.submit(self._decode, numbers, memory))
            while under_way:
                batch = under_way.popleft().result()
                for numbers in islice(batches, 1):
                    under_way.append(pool.submit(self._decode, numbers, memory))
                if self._finish is not None:
                    batch = self._finish(batch)
                yield pin_memory(batch) if is_pinned else batch  # type: ignore[no-untyped-call]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _decode(self, numbers: Sequence[int], memory: ImageBatchMemory) -> Any:
        samples = self._source.fetch_encoded(numbers)
        if self._finish is None:
            return decoded_batch(samples, memory)
        return [decoded_sample(sample) for sample in samples]
