"""Order of samples by seed and epoch, shards of a worker, random number generators (torch)."""

import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.utils.data
from torch.utils.data import Dataset

from paceline._base.arguments_and_errors import mix_seed
from paceline._base.exceptions import add_note, text_of


def shuffled_indices(num_samples: int, seed: int, epoch: int) -> Sequence[int]:
    """Return the permutation of an epoch."""
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
    permutation = torch.randperm(num_samples, generator=generator)
    if num_samples >= 1 << 31:
        return array("q", permutation.numpy().tobytes())
    # A list would take ten times the memory of these, for as long as the epoch lasts.
    return array("i", permutation.to(torch.int32).numpy().tobytes())


def worker_shards(num_shards: int, rank: int, world_size: int) -> range:
    """Return the shards of a worker, in order; each shard belongs to a single worker.

    The first workers get one more if the number is no multiple; workers beyond the number of shards
    get none.
    """
    whole, rest = divmod(num_shards, world_size)
    start = rank * whole + min(rank, rest)
    return range(start, start + whole + (rank < rest))


class CutIndices(Sequence[Sequence[int]]):
    """Sample indices cut into shards of equal size; only the last may be smaller.

    Args:
        indices: The samples.
        shard_size: The samples of a shard.
        drop_last: Whether a smaller last shard is left out.
    """

    def __init__(self, indices: Sequence[int], shard_size: int, *, drop_last: bool) -> None:
        self.shard_size = shard_size
        self._indices = indices
        self._num_shards = len(indices) // shard_size
        if not drop_last and len(indices) % shard_size:
            self._num_shards += 1

    def __len__(self) -> int:
        return self._num_shards

    @property
    def num_samples(self) -> int:
        """The number of samples in all shards."""
        return min(len(self._indices), self._num_shards * self.shard_size)

    def first(self, num_shards: int) -> "CutIndices":
        """Return the first shards."""
        size = self.shard_size
        return CutIndices(self._indices[: num_shards * size], size, drop_last=False)

    def from_shard(self, start: int) -> Iterator[Sequence[int]]:
        """Return the shards from a position onward; cheaper than access by index."""
        size, end = self.shard_size, self._num_shards * self.shard_size
        starts, ends = range(start * size, end, size), range((start + 1) * size, end + size, size)
        return map(self._indices.__getitem__, map(slice, starts, ends))

    @overload
    def __getitem__(self, index: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sequence[int]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[int] | list[Sequence[int]]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._num_shards))]
        if not 0 <= index < self._num_shards:
            raise IndexError(index)
        start = index * self.shard_size
        return self._indices[start : start + self.shard_size]


def without_rest(shards: Sequence[Sequence[int]], num_shards: int) -> Sequence[Sequence[int]]:
    """Return the shards of complete global batches, without a smaller last batch."""
    num_whole = len(shards) // num_shards * num_shards
    if num_whole == len(shards):
        return shards
    first = getattr(shards, "first", None)
    return shards[:num_whole] if first is None else first(num_whole)


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """Samples of an epoch, cut into shards; global batch b has shards b*L to b*L + L - 1.

    Attributes:
        shards: Sample indices of each shard, in order.
        num_shards: L, the number of shards of a global batch.
    """

    shards: Sequence[Sequence[int]]
    num_shards: int

    @property
    def num_batches(self) -> int:
        """The number of global batches; the last may be smaller."""
        return -(-len(self.shards) // self.num_shards)

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        counted: int | None = getattr(self.shards, "num_samples", None)
        return sum(map(len, self.shards)) if counted is None else counted

    @property
    def shard_size(self) -> int | None:
        """The samples of every shard but the last; None if they differ."""
        return self.shards.shard_size if isinstance(self.shards, CutIndices) else None

    def shard(self, batch: int, shard: int) -> Sequence[int]:
        """Return the sample indices of a shard; empty beyond the end of the data."""
        index = batch * self.num_shards + shard
        return self.shards[index] if index < len(self.shards) else ()

    def sizes(self, batch: int, shards: range) -> list[int]:
        """Return the number of samples of some shards of a global batch; empty ones left out."""
        first = batch * self.num_shards
        return [len(shard) for shard in self.shards[first + shards.start : first + shards.stop]]

    def num_records(self, batch: int) -> int:
        """Return the number of samples of a global batch."""
        first = batch * self.num_shards
        return sum(len(shard) for shard in self.shards[first : first + self.num_shards])


_BEGIN = "While reading"
_MOST_NUMBERS = 16
# Hint for a lost loader process, found by the text of torch's error messages.
_LOST_PROCESS = (
    "Hint: a process of the data loader was killed, as happens if the memory runs out. Use fewer"
    " `num_workers` or smaller batches."
)
_HINTS = {
    "exited unexpectedly": _LOST_PROCESS,
    "DataLoader timed out after": (
        "Hint: a process of the data loader gave no batch within the loader's `timeout`. Look at"
        " what the data set waits for, or raise `timeout`."
    ),
}


def note_samples(error: BaseException, dataset: Any, batch: Sequence[Any]) -> None:
    """Add a note to an error with the samples in reading when the error was raised.

    Args:
        error: The error.
        dataset: The data set.
        batch: The numbers of the samples, or of those of several shards.
    """
    hint = next((hint for words, hint in _HINTS.items() if words in text_of(error)), None)
    if hint is None and _is_broken_connection(error):
        hint = _LOST_PROCESS
    if hint is not None:
        add_note(error, hint)
    elif batch and _BEGIN not in f"{text_of(error)} {getattr(error, '__notes__', '')}":
        add_note(
            error, f"{_BEGIN} {_failed_samples(error, dataset) or _listed_samples(dataset, batch)}."
        )


def _is_broken_connection(error: BaseException) -> bool:
    """Return whether a loader process ended while sending a batch; torch does not report this."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    is_kind = isinstance(error, (EOFError, ConnectionError, FileNotFoundError))
    module = "" if step is None else step.tb_frame.f_globals.get("__name__", "")
    return is_kind and module == "multiprocessing.connection"


def _failed_samples(error: BaseException, dataset: Any) -> str | None:
    """Return the sample of the failed `__getitem__` from the traceback, or None."""
    step = error.__traceback__
    while step is not None:
        code, values = step.tb_frame.f_code, step.tb_frame.f_locals
        if code.co_name == "__getitem__" and code.co_argcount == 2:
            owner, number = (values.get(name) for name in code.co_varnames[:2])
            if owner is dataset or isinstance(owner, Dataset):
                return f"sample {number!r} of {type(owner).__name__}"
        step = step.tb_next
    return None


def _listed_samples(dataset: Any, batch: Sequence[Any]) -> str:
    parts = [part if isinstance(part, list) else [part] for part in batch]
    numbers = [number for part in parts for number in part]
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    more = ", ..." if len(numbers) > _MOST_NUMBERS else ""
    noun = "sample" if len(numbers) == 1 else "samples"
    return f"{noun} {shown}{more} of {type(dataset).__name__}"


_NUMPY_SEED_LIMIT = 2**32


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch (all devices); ranks draw different numbers."""
    mixed = mix_seed(seed, rank) if rank else seed
    random.seed(mixed)
    _seed_torch(mixed)
    if "numpy" in sys.modules or _has_numpy():
        import numpy

        # NumPy takes seeds of 32 bits only.
        numpy.random.seed(mixed % _NUMPY_SEED_LIMIT)


def _seed_torch(seed: int) -> None:
    if torch.accelerator.current_accelerator() is None:
        # `manual_seed` keeps a stack for each kind of device, in case that one is used later.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def capture_random_state() -> dict[str, Any]:
    """Return the state of all generators of this process: tensors, lists and numbers."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state(),
    }
    if _has_numpy():
        import numpy

        legacy: Any = numpy.random.get_state(legacy=True)
        kind, keys, position, has_gauss, cached = legacy
        state["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    # Uninitialised CUDA is left alone: asking for the state would take GPU memory.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        state["cuda"] = torch.cuda.get_rng_state()
        if others := _other_devices():
            state["cuda_others"] = [torch.cuda.get_rng_state(device) for device in others]
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore a state returned by `capture_random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and _has_numpy():
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state(
            (kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached)
        )
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    if "cuda" in state and is_used:
        torch.cuda.set_rng_state(state["cuda"])
        # Visible GPUs may be more or fewer than when the state was captured.
        for device, own in zip(_other_devices(), state.get("cuda_others", ()), strict=False):
            torch.cuda.set_rng_state(own, device)


@contextmanager
def isolated_randomness(seed: int) -> Iterator[None]:
    """Run a block with seeded generators and put the present ones back afterwards."""
    saved = capture_random_state()
    seed_everything(seed)
    try:
        yield
    finally:
        restore_random_state(saved)


class IteratorWithGenerators:
    """Iterator with random generators of its own, swapped in for each item.

    Args:
        source: The iterator.
        seed: The seed of its generators.

    Attributes:
        state: The generators' state before the next item, as `capture_random_state` returns it.
    """

    def __init__(self, source: Iterator[Any], seed: int) -> None:
        self._source = source
        with isolated_randomness(seed):
            self.state: dict[str, Any] | None = capture_random_state()

    def __iter__(self) -> "IteratorWithGenerators":
        return self

    def __next__(self) -> Any:
        outside = capture_random_state()
        if self.state is not None:
            restore_random_state(self.state)
        try:
            return next(self._source)
        finally:
            self.state = capture_random_state()
            restore_random_state(outside)


def _other_devices() -> list[int]:
    """Return the other GPUs visible to this process; a process may use several."""
    own = torch.cuda.current_device()
    return [device for device in range(torch.cuda.device_count()) if device != own]


def _has_numpy() -> bool:
    try:
        import numpy  # noqa: F401  # only whether it is there
    except ImportError:
        return False
    return True


class SeededShard(list[int]):
    """Sample indices of a shard, with the seed of its random augmentation."""

    seed: int

    def __reduce__(self) -> Any:
        return make_seeded_shard, (list(self), self.seed)


def make_seeded_shard(indices: Sequence[int], seed: int) -> SeededShard:
    """Return the indices of a shard with a seed."""
    shard = SeededShard(indices)
    shard.seed = seed
    return shard


class SeededShardDataset(torch.utils.data.Dataset[Any]):
    """Map-style data set, for loader processes to reseed themselves before every shard.

    The random numbers of a loader's worker processes then depend on the shard alone, not on the
    worker or the place where the epoch began. Other attributes come from the user's data set.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, shard: SeededShard | list[SeededShard]) -> list[Any]:
        if not isinstance(shard, SeededShard):
            return [sample for part in shard for sample in self.__getitems__(part)]
        seed_everything(shard.seed)
        try:
            fetch_all = getattr(self._dataset, "__getitems__", None)
            if fetch_all is not None:
                samples: list[Any] = fetch_all(list(shard))
                return samples
            return [self._dataset[index] for index in shard]
        except Exception as error:
            # The traceback does not leave this process.
            note_samples(error, self._dataset, shard)
            raise

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Attributes set by a `worker_init_fn`, such as an open file, go to the user's data set.
        if name == "_dataset":
            super().__setattr__(name, value)
        else:
            setattr(self._dataset, name, value)


class ShardBatchSampler(torch.utils.data.Sampler[Any]):
    """Batch sampler of the cloned loader: a worker's shards from some batch onward.

    Joined shards are one fetch per global batch, also where the worker has none of its own.
    """

    def __init__(self) -> None:
        self.order = EpochOrder((), 1)
        self.own_shards = range(0)
        self.start_batch = 0
        self.seed_parts: tuple[int, ...] = ()
        self.is_keyed = False
        self.is_joined = False

    def __iter__(self) -> Iterator[list[Any]]:
        shards_of_epoch = self.order.shards
        is_plain = self.order.num_shards == 1 and len(self.own_shards) == 1 and not self.is_keyed
        # Fast path without Python code for each batch.
        if is_plain and isinstance(shards_of_epoch, CutIndices):
            return map(list, shards_of_epoch.from_shard(self.start_batch))
        return self._own_batches()

    def _own_batches(self) -> Iterator[list[Any]]:
        for batch in range(self.start_batch, self.order.num_batches):
            shards = [
                self._indices(batch, shard)
                for shard in self.own_shards
                if len(self.order.shard(batch, shard))
            ]
            if self.is_joined:
                yield self._join(shards or [self._indices(batch, 0)])
            else:
                yield from shards

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _indices(self, batch: int, shard: int) -> list[int]:
        indices = self.order.shard(batch, shard)
        if not self.is_keyed:
            return list(indices)
        return make_seeded_shard(indices, mix_seed(*self.seed_parts, batch, shard))

    def _join(self, shards: list[list[int]]) -> list[Any]:
        if len(shards) == 1:
            return shards[0]
        # Keyed ones stay apart, as each is seeded by itself.
        return list(shards) if self.is_keyed else [index for shard in shards for index in shard]
