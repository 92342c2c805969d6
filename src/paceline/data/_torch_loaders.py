"""Torch's view of a data set: a loader that decodes ahead, batches on their way to a device."""

import copy
import gc
import inspect
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from paceline._base.arguments_and_errors import check_count
from paceline._base.process_and_network import num_cores
from paceline.data._dataset import Stream
from paceline.data._default_batches import collate_samples
from paceline.data._file_index_and_format import IMAGES, Encoded, decode, decoded_sample, open_image
from paceline.data._sample_sources import SamplesInMemory, Source
from paceline.data._stream_pieces import StreamPieces

logger = logging.getLogger(__name__)


class ImageBatchMemory:
    """Pool of arrays for image batches, reused when no reference to a batch is left.

    New memory costs a third as much time as the images that are decoded into it.

    Args:
        most: How many batches are kept.
    """

    def __init__(self, most: int) -> None:
        # Reference counts are exact only in CPython with its global lock: they show whether a batch
        # is still in use. Other interpreters get new memory for each batch.
        has_exact_counts = sys.implementation.name == "cpython" and _has_global_lock()
        self._most = most if has_exact_counts else 0
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        # A tensor, and whatever shares its memory, holds the array that it was made of.
        unused = [np.empty(0)]
        self._num_unused = sys.getrefcount(unused[0])

    def take(self, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised array of uint8."""
        with self._lock:
            kept = self._kept
            for number in range(len(kept)):
                if sys.getrefcount(kept[number]) == self._num_unused:
                    if kept[number].shape == shape:
                        return kept[number]
                    # Unused array of another shape: its slot is freed for the new shape.
                    del kept[number]
                    break
            array = np.empty(shape, np.uint8)
            if len(kept) < self._most:
                kept.append(array)
            return array


def _has_global_lock() -> bool:
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def decoded_batch(samples: Sequence[Mapping[str, Any]], memory: ImageBatchMemory) -> Any:
    """Return a batch of encoded samples, decoded and collated as by `collate_samples`.

    Images of one size are decoded into the memory of the batch. Memory for each of them would
    cost half as much time as to decode it.

    Args:
        samples: The samples.
        memory: Gives the memory.

    Raises:
        DataFormatError: A content is damaged.
        ValueError: Images have different sizes.
    """
    keys = list(samples[0])
    if any(list(sample) != keys for sample in samples):
        return collate_samples([decoded_sample(sample) for sample in samples])
    batch = {}
    for key in keys:
        values = [sample[key] for sample in samples]
        is_encoded = all(isinstance(value, Encoded) for value in values)
        if is_encoded and all(value.name.lower().endswith(IMAGES) for value in values):
            batch[key] = _images(values, memory)
        if batch.get(key) is None:
            each = [decode(*value) if isinstance(value, Encoded) else value for value in values]
            batch[key] = collate_samples([{key: value} for value in each])[key]
    return batch


def _images(values: Sequence[Encoded], memory: ImageBatchMemory) -> Any:
    """Return decoded images in a single tensor, or None if the sizes differ."""
    import torch

    batch: Any = None
    for number, value in enumerate(values):
        with open_image(*value) as image:
            if batch is None:
                batch = memory.take((len(values), image.height, image.width, 3))
            if (image.height, image.width) != batch.shape[1:3]:
                return None
            batch[number] = np.asarray(image)
    return torch.from_numpy(batch)


TorchData: TypeAlias = Any
"""A batch: a tensor, or a nested dictionary, list or tuple of tensors and other values."""

_LEFT_ALONE = (str, bytes, int, float, complex, type(None))


def to_device(data: TorchData, device: torch.device, warned: set[type] | None = None) -> TorchData:
    """Return `data` with every tensor on a device; NumPy arrays become tensors.

    Containers keep their type, and values with a `to` method of their own move themselves.
    Other values are returned unchanged, with one warning per type.

    Args:
        data: Nested data.
        device: Where to move it.
        warned: The types that were warned of already; updated.
    """
    kind: Any = type(data)
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if kind is list or kind is tuple:
        values = [to_device(value, device, warned) for value in data]
        return values if kind is list else tuple(values)
    # Looked up in the type, as a dictionary's attributes may be its values.
    if hasattr(kind, "to"):
        return data.to(device, non_blocking=True) if _can_move_on(kind) else data.to(device)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device, warned) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(value, device, warned) for value in data)
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device, warned) for key, value in data.items()}
        return moved if type(data) is dict else _like(data, moved)
    if _is_numeric_array(data):
        return to_device(torch.as_tensor(data), device)
    if not isinstance(data, _LEFT_ALONE):
        seen = set() if warned is None else warned
        if type(data) not in seen:
            seen.add(type(data))
            logger.warning(
                "Values of type %s stay where they are. Hint: give the type a method"
                " `to(device)` that returns it moved.",
                type(data).__name__,
            )
    return data


def mover_to(device: torch.device, warned: set[type] | None = None) -> Callable[[Any], Any]:
    """Return `to_device` bound to a device, with a fast path for data already there."""
    if device.type != "cpu":

        def move_on(data: Any) -> Any:
            # Fast path for lists of tensors, the output of torch's collate: runs in every step.
            if type(data) is list:
                for value in data:
                    if type(value) is not torch.Tensor:
                        break
                else:
                    return [value.to(device, non_blocking=True) for value in data]
            return to_device(data, device, warned)

        return move_on

    def move(data: Any) -> Any:
        # Fast path for lists of CPU tensors, the output of torch's collate: runs in every step.
        kind = type(data)
        if kind is list or kind is tuple:
            for value in data:
                if type(value) is not torch.Tensor or not value.is_cpu:
                    break
            else:
                return data
        return to_device(data, device, warned)

    return move


def release_device_memory() -> None:
    """Free GPU memory of earlier trainings in this process, held by reference cycles alone.

    Torch's schedulers make such cycles. Python looks for cycles after it has made many objects,
    and does not know how full a GPU is.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        gc.collect()


def data_length(data: TorchData) -> int:
    """Return the number of samples of a batch: the length of the first leaf other than None.

    Raises:
        ValueError: A container is empty.
        TypeError: The first leaf has no length; override `get_batch_length` then.
    """
    if isinstance(data, PackedSequence):
        return int(data.batch_sizes[0])
    if isinstance(data, (Mapping, list, tuple)):
        values = data.values() if isinstance(data, Mapping) else data
        if not len(data):
            raise ValueError(f"A batch must not be empty, but got an empty {type(data).__name__}.")
        first = next((value for value in values if value is not None), None)
        is_sample = not isinstance(data, Mapping) and _is_single(first)
        return len(data) if is_sample else data_length(first)
    shape = getattr(data, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    if hasattr(data, "__len__") and not isinstance(data, (str, bytes)):
        return len(data)
    raise TypeError(
        f"A batch of type {type(data).__name__} has no length. Hint: override"
        " `get_batch_length` in the trial."
    )


@lru_cache(maxsize=64)
def _can_move_on(kind: Hashable) -> bool:
    """Return whether a type's own `to` can leave the copy to the device, as a tensor's can."""
    # The method takes any arguments, and passes them to the tensors.
    if kind is PackedSequence:
        return True
    try:
        return "non_blocking" in inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False


def _is_single(value: Any) -> bool:
    """Return whether a list element is a single sample of the list, not a container."""
    is_container = isinstance(value, (Mapping, list, tuple)) or hasattr(value, "shape")
    return not is_container


def _is_numeric_array(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return type(value).__module__ == "numpy" and getattr(dtype, "kind", "O") in "biufc"


def _like(data: Mapping[Any, Any], moved: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return the moved values in a copy of the mapping, or as a plain dict if immutable."""
    if not isinstance(data, MutableMapping):
        return moved
    same = copy.copy(data)
    same.update(moved)
    return same


if TYPE_CHECKING:
    from paceline.data._dataset import Dataset


_MOST_THREADS = 4


class DecodingLoader(DataLoader[Any]):
    """Loader of samples in need of decoding, with decoding threads in this process.

    Without processes of its own, threads decode the next batches. The stages of the data set and
    a user's `collate` run in the thread that iterates, in the order of the batches: they may draw
    at random. With processes, it is torch's.

    Args:
        dataset: The view of the data set.
        source: Its samples.
        finish: Makes a batch of decoded samples; None for `collate_samples`.
        options: The options of a `DataLoader`.
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
        # Base seed drawn as by torch's own iterator: later random draws stay the same.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        is_pinned = self.pin_memory and torch.cuda.is_available()
        num_threads = min(_MOST_THREADS, num_cores())
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="paceline-decode")
        # Memory for the batches being decoded, and for two in use by the loop over the batches.
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
            # No wait: a loop that was left early has no use for the next batches.
            pool.shutdown(wait=False, cancel_futures=True)

    def _decode(self, numbers: Sequence[int], memory: ImageBatchMemory) -> Any:
        samples = self._source.fetch_encoded(numbers)
        if self._finish is None:
            return decoded_batch(samples, memory)
        return [decoded_sample(sample) for sample in samples]


_DRAWN_AT_ONCE = 4096


class TorchLoaderSamples(torch.utils.data.Dataset[Any]):
    """Samples of a data set by number, fetched together for each batch of a loader.

    Args:
        dataset: The data set, none that is a stream.
    """

    def __init__(self, dataset: "Dataset") -> None:
        self.dataset = dataset
        self._length = len(dataset)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        return self.dataset[number]

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        return self.dataset.fetch(numbers)

    def epoch_order(self, **options: Any) -> Sequence[Sequence[int]] | None:
        """Return the order of an epoch; see `Dataset.epoch_order`."""
        return self.dataset.epoch_order(**options)

    def identity(self) -> Mapping[str, Any] | None:
        """Return facts to recognise these samples by in a checkpoint, or None."""
        return self.dataset.identity()


class TorchLoaderOrder(torch.utils.data.Sampler[int]):
    """Sampler in the order of samples in pieces, for loaders outside of a run.

    Each iteration is an epoch, whose order comes from torch's seed; see `set_epoch`.

    Args:
        dataset: The data set.
    """

    is_order_of_dataset = True

    def __init__(self, dataset: "Dataset") -> None:
        self.is_shuffled = dataset.plan.is_shuffled
        self._dataset = dataset
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        shards = self._dataset.epoch_order(
            seed=torch.initial_seed(),
            epoch=self._epoch,
            num_shards=1,
            shard_size=_DRAWN_AT_ONCE,
            drop_last=False,
            is_shuffled=self.is_shuffled,
        )
        assert shards is not None
        self._epoch += 1
        return (number for shard in shards for number in shard)


class _Collate:
    """Collate function for fetched samples: columns become tensors directly.

    Args:
        collate: The user's, of a list of samples.
    """

    def __init__(self, collate: Callable[[Any], Any] | None) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        if self._collate is not None:
            return self._collate(list(samples))
        to_torch = getattr(samples, "to_torch", None)
        return collate_samples(samples) if to_torch is None else to_torch()


class TorchLoaderStream(IterableDataset[Any]):
    """The samples of a stream.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def stream_pieces(self) -> StreamPieces | None:
        """Return the stream in pieces, or None if only readable as a whole."""
        return self._stream.pieces()

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the stream's data, if they have `set_epoch`."""
        set_epoch = getattr(self._stream.data, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class TorchLoaderPlacedStream(TorchLoaderStream):
    """Samples of a stream with a position to store and restore."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the place."""
        data: Any = self._stream.data
        state: Mapping[str, Any] = data.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a place."""
        data: Any = self._stream.data
        data.load_state_dict(state)


def make_loader(
    dataset: "Dataset",
    batch_size: int,
    num_workers: int,
    collate: Callable[[Any], Any] | None,
    options: dict[str, Any],
) -> "DataLoader[Any]":
    """Return a torch loader of a data set; see `Dataset.to_torch`."""
    _check_loader_options(dataset.source, batch_size, options)
    if collate is None and batch_size is not None:
        options["collate_fn"] = collate_samples
    options = {"collate_fn": collate, **options, "num_workers": num_workers}
    source = dataset.source
    if isinstance(source, Stream):
        return DataLoader(_stream_for_loader(source), batch_size, **options)
    data: Any = TorchLoaderSamples(dataset)
    kind: Any = DataLoader
    if source.is_encoded:
        finish: Callable[[Any], Any] | None = None
        if collate is not None or dataset.has_stages:
            finish = partial(_finished, dataset, collate or collate_samples)
        kind = partial(DecodingLoader, source=source, finish=finish)
    if source.chunk_sizes() is not None:
        options.update(collate_fn=_Collate(collate), sampler=TorchLoaderOrder(dataset))
    else:
        # Torch refuses to shuffle nothing.
        options["shuffle"] = dataset.plan.is_shuffled and len(source) > 0
        if isinstance(source, SamplesInMemory) and not dataset.has_stages:
            data = source.data
    loader: DataLoader[Any] = kind(data, batch_size=batch_size, **options)
    return loader


def _check_loader_options(
    source: Source | Stream, batch_size: object, options: dict[str, Any]
) -> None:
    """Check for loader options without effect on samples in pieces.

    Raises:
        ValueError: One has no effect.
    """
    if isinstance(source, Stream) or source.chunk_sizes() is None:
        return
    check_count("batch_size", batch_size)
    for name in ("sampler", "batch_sampler"):
        if options.get(name) is not None:
            raise ValueError(
                f"`{name}` must not be given for samples of files, whose order makes workers read"
                " few of them. Hint: `shuffle`, `filter` and `split` choose samples."
            )


def _finished(dataset: "Dataset", collate: Callable[[Any], Any], samples: Any) -> Any:
    return collate(dataset.apply_stages(samples))


def _stream_for_loader(stream: Stream) -> IterableDataset[Any]:
    data: Any = stream.data
    if isinstance(data, IterableDataset) and not stream.steps:
        return data
    # Hugging Face streams do not resume exactly from their state, see `WholeStream._source`.
    is_trusted = not type(data).__module__.startswith("datasets.")
    has_place = hasattr(data, "state_dict") and is_trusted and not stream.holds_samples
    return TorchLoaderPlacedStream(stream) if has_place else TorchLoaderStream(stream)
