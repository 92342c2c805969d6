"""States that survivors of a lost rank save: weights are alike, small states are in memory."""

import fcntl
import logging
import math
import mmap
import os
import pickle
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline._base.files import open_regular_below, opened_directory
from paceline._training.engine.checkpoints.state_files import save_state
from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.optimizer_stepper import Stepper
from paceline.core._arguments import DistributedError

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<qqQ")
_HEADER_BYTES = 64
_NO_STEP = -1
_ALIGNMENT = 16
_MAX_BUFFER_BYTES = 8 * 1024 * 1024
_SPARE_BYTES = 64 * 1024
_MAX_STRIDE = 1 << 20
_SAVED = "saved"
# How much the newest duration counts in the mean.
_NEWEST_SHARE = 0.1


class SmallState(NamedTuple):
    """What is small of a state at a boundary between two batches, on one rank.

    Attributes:
        own: The rank's own part of a checkpoint, without buffers.
        training: Entries of the part "training".
        groups: The settings of each optimizer's parameter groups.
        buffers: The buffers of each model by name.
    """

    own: dict[str, Any]
    training: dict[str, Any]
    groups: list[list[dict[str, Any]]]
    buffers: Sequence[Mapping[str, torch.Tensor]] = ()


class HasBoundaries(Protocol):
    """A training whose small states are noted at the boundaries between batches."""

    def small_state(self) -> SmallState:
        """Return the small state of this rank, but for buffers; it may refer to what changes."""

    def captured_at(self, by_rank: Sequence[SmallState]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return all parts and the metadata of a checkpoint, from states that `rank` order has."""


class _Pickler(pickle.Pickler):
    """Pickler of tensors as arrays, in a fraction of the time."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is made of an array."""
        if type(value) is torch.Tensor and value.dtype is not torch.bfloat16:
            return torch.from_numpy, (value.detach().numpy(),)
        return NotImplemented


class _Slots:
    """File with the small states of a rank at its last two boundaries, which outlives the rank.

    Args:
        buffers: The buffers that each state has, alike on all ranks.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._forms = [(buffer.shape, buffer.dtype) for buffer in buffers]
        sizes = [-(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT for buffer in buffers]
        self._offsets = [_HEADER_BYTES + sum(sizes[:index]) for index in range(len(sizes))]
        self._data_at = _HEADER_BYTES + sum(sizes)
        self._seed = xxhash.xxh3_64_intdigest(repr(self._forms).encode())
        self._size = 0
        self._next = 0
        self._map: mmap.mmap | None = None
        self._views: list[list[torch.Tensor]] = []

    def make(self, path: Path, num_bytes: int) -> None:
        """Make the file, for states of so many bytes besides buffers."""
        self._size = -(-(self._data_at + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            # A write to a map of a full file system would end this process.
            os.posix_fallocate(descriptor, 0, 2 * self._size)
            self._map = mmap.mmap(descriptor, 2 * self._size)
        finally:
            os.close(descriptor)
        self._views = [self._buffers_in(self._map, slot * self._size) for slot in range(2)]
        for slot in range(2):
            _HEADER.pack_into(self._map, slot * self._size, _NO_STEP, 0, 0)

    def write(self, step: int, data: memoryview, buffers: Sequence[torch.Tensor]) -> None:
        """Replace the older state.

        Raises:
            OSError: The state has become too large.
        """
        assert self._map is not None
        start, views = self._next * self._size, self._views[self._next]
        if self._data_at + len(data) > self._size:
            raise OSError(f"the state of a rank has grown to {len(data)} bytes")
        _HEADER.pack_into(self._map, start, _NO_STEP, 0, 0)
        if [(buffer.shape, buffer.dtype) for buffer in buffers] != self._forms:
            raise ValueError("the buffers of a model have other shapes than before")
        if buffers:
            torch._foreach_copy_(views, list(buffers))
        self._map[start + self._data_at : start + self._data_at + len(data)] = data
        digest = xxhash.xxh3_64_intdigest(data, self._seed)
        _HEADER.pack_into(self._map, start, step, len(data), digest)
        self._next = 1 - self._next

    def read(self, content: bytes, step: int) -> tuple[bytes, list[torch.Tensor]] | None:
        """Return a state in the content of a rank's file; None if it is not there as a whole."""
        half = len(content) // 2
        for start in (0, half):
            if half < self._data_at:
                break
            found, size, digest = _HEADER.unpack_from(content, start)
            data = content[start + self._data_at : start + half][: max(size, 0)]
            if found == step and xxhash.xxh3_64_intdigest(data, self._seed) == digest:
                return data, self._buffers_in(bytearray(content), start)
        return None

    def _buffers_in(self, memory: Any, start: int) -> list[torch.Tensor]:
        return [
            torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=start + offset).view(
                shape
            )
            for (shape, dtype), offset in zip(self._forms, self._offsets, strict=True)
        ]


class BoundaryStates:
    """Small states of all ranks at the boundaries between batches, and the survivors' use of them.

    In plain data-parallel training, ranks have the same weights and optimizer states. What differs
    is small, and each rank notes it in memory at each boundary, after which no gradient is open.
    When a rank is lost before a survivor's next optimizer step, that survivor still has the
    weights of its last boundary. If all ranks have noted this one, they are a whole state.

    Args:
        stepper: The models and optimizers.
        training: The training; its owner keeps it alive.
        directory: Where the ranks of this start have their files.
        rank: This rank.
        world_size: The number of ranks.
        share: The share of time that notes may take.
    """

    def __init__(
        self,
        stepper: Stepper,
        training: HasBoundaries,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        share: float,
    ) -> None:
        self._stepper = stepper
        self._training: HasBoundaries = weakref.proxy(training)
        self._directory = directory
        self._rank, self._world_size, self._share = rank, world_size, share
        self._step = _NO_STEP
        self._stride = 1
        self._note_s = self._batch_s = 0.0
        self._noted_s = 0.0
        self._has_stepped = True
        self._parameters = stepper.parameters()
        self._samples = _samples(self._parameters)
        self._sampled: Any = None
        self._watched: list[torch.Tensor] = []
        self._num_states: list[int] = []
        self._versions: list[int] = []
        self._places = [(m._buffers, name) for m in _modules(stepper) for name in m._buffers]
        self._slots: _Slots | None = _Slots(self._buffers())
        # Also for optimizers that nobody knows here.
        self._hook = register_optimizer_step_pre_hook(self._note_step)

    def _buffers(self) -> list[torch.Tensor]:
        found = [buffers[name] for buffers, name in self._places]
        return [buffer for buffer in found if buffer is not None]

    def _note_step(self, *_: object) -> None:
        self._has_stepped = True

    def note(self, num_batches: int) -> None:
        """Note the state after so many batches, unless gradients are open or it costs too much."""
        if self._slots is None or num_batches % self._stride or num_batches == self._step:
            return
        if any(parameter.grad is not None for parameter in self._parameters):
            return
        began_s = time.perf_counter()
        try:
            self._note(self._slots, num_batches)
        except (OSError, pickle.PicklingError, RuntimeError, TypeError, ValueError) as error:
            logger.info("Surviving ranks will not save their states: %s.", error)
            self.close()
            return
        self._pace(num_batches, began_s)
        self._step = num_batches

    def _note(self, slots: _Slots, num_batches: int) -> None:
        file = BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(tuple(self._training.small_state()))
        data = file.getbuffer()
        if self._step == _NO_STEP:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            slots.make(self._directory / str(self._rank), 2 * len(data) + _SPARE_BYTES)
        slots.write(num_batches, data, self._buffers())
        stepper = self._stepper
        if (num_states := [len(o.state) for o in stepper.optimizers]) != self._num_states:
            self._num_states = num_states
            states = [s for o in stepper.optimizers for s in o.state.values()]
            tensors = [each for state in states for each in state.values()]
            self._watched = [*self._parameters, *(t for t in tensors if type(t) is torch.Tensor)]
        self._versions = [tensor._version for tensor in self._watched]
        self._sampled = torch.cat(self._samples)
        self._has_stepped = False

    def _pace(self, num_batches: int, began_s: float) -> None:
        """Set after how many batches the next note comes: a power of 2, so that ranks agree."""
        now_s = time.perf_counter()
        if self._step == _NO_STEP:
            # The first note makes the file.
            self._noted_s = now_s
            return
        batch_s = (now_s - self._noted_s) / (num_batches - self._step)
        share = _NEWEST_SHARE if self._batch_s else 1.0
        self._batch_s += share * (batch_s - self._batch_s)
        self._note_s += share * (now_s - began_s - self._note_s)
        wanted = min(self._note_s / (self._share * self._batch_s), _MAX_STRIDE)
        self._stride = 1 << max(0, math.ceil(math.log2(wanted)))
        self._noted_s = now_s

    def save(
        self,
        error: BaseException,
        store: Callable[[Mapping[str, Any], Callable[[Path], None]], None],
        free_bytes: int,
    ) -> bool:
        """Save the state of the last boundary if this rank has it; return whether it is there.

        Args:
            error: What has ended the training.
            store: Stores files with metadata as a whole state.
            free_bytes: How much memory there is.
        """
        is_of_peer = isinstance(error, (DistributedError, torch.distributed.DistError))
        if not (is_of_peer or type(error) is RuntimeError) or not self._is_unchanged():
            return False
        if sum(tensor.nbytes for tensor in self._watched) > free_bytes:
            return False
        with opened_directory(self._directory) as descriptor:
            # One survivor saves; if it dies meanwhile, the lock goes to the next one.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if (self._directory / _SAVED).exists():
                return True
            by_rank = [self.read(rank) for rank in range(self._world_size)]
            states = [state for state in by_rank if state is not None]
            if len(states) < self._world_size or not _agree(states):
                return False
            parts, metadata = self._training.captured_at(states)

            def write(path: Path) -> None:
                for name, part in parts.items():
                    save_state(part, path, name)

            store(metadata, write)
            (self._directory / _SAVED).touch()
        logger.warning(
            "Another rank is lost. Rank %d keeps the state after step %d for the next start.",
            self._rank,
            self._step,
        )
        return True

    def _is_unchanged(self) -> bool:
        """Tell whether weights and optimizer states are those of the last boundary."""
        stepper = self._stepper
        if self._step == _NO_STEP or self._has_stepped or not stepper.accumulation.is_even:
            return False
        parameters = stepper.parameters()
        return (
            [*map(id, parameters)] == [*map(id, self._parameters)]
            and [tensor._version for tensor in self._watched] == self._versions
            # Changes of `parameter.data` have no version.
            and torch.equal(torch.cat(_samples(parameters)), self._sampled)
        )

    def read(self, rank: int) -> SmallState | None:
        """Return what a rank has noted at this rank's last boundary, or None.

        Raises:
            NotRegularFileError: Its file is a link, or of another user.
        """
        assert self._slots is not None
        try:
            with (
                opened_directory(self._directory) as directory,
                open_regular_below(directory, str(rank), owners=[os.geteuid()]) as file,
            ):
                found = self._slots.read(file.read(), self._step)
        except FileNotFoundError:
            return None
        if found is None:
            return None
        # Written by a rank of this run, in a directory of this user alone.
        state = SmallState(*pickle.loads(found[0]))  # noqa: S301
        values, buffers = iter(found[1]), []
        for model in map(plain_model, self._stepper.models):
            names = [
                f"{prefix}.{name}".lstrip(".")
                for prefix, module in model.named_modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
            buffers.append({name: next(values) for name in names})
        return state._replace(buffers=buffers)

    def close(self) -> None:
        """Note no more states."""
        self._slots, self._step = None, _NO_STEP
        self._hook.remove()


def _modules(stepper: Stepper) -> list[torch.nn.Module]:
    return [module for model in stepper.models for module in plain_model(model).modules()]


def _samples(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the first element of each parameter, as views of its memory."""
    return [p.detach().as_strided((1,), (1,), p.storage_offset()) for p in parameters if p.numel()]


def _agree(states: Sequence[SmallState]) -> bool:
    """Tell whether ranks are at the same position, after equally many steps."""
    names = ("position", "num_optimizer_steps", "optimizer_steps")
    return all(len({str(state.training[name]) for state in states}) == 1 for name in names)


def survivors_problem(stepper: Stepper) -> str:
    """Return why survivors cannot save the state of all ranks; empty if they can."""
    modules = _modules(stepper)
    buffers = [each for module in modules for each in module._buffers.values() if each is not None]
    tensors = [*stepper.parameters(), *buffers]
    if any(map(torch.nn.parameter.is_lazy, tensors)):
        return "a model has lazy parameters"
    if stepper.is_divided or stepper.all_reduce is not None:
        return "ranks divide the model, or sum gradients by Horovod"
    if any(type(tensor.data) is not torch.Tensor or not tensor.is_cpu for tensor in tensors):
        return "only models on the CPU can have that"
    if any(type(m).get_extra_state is not torch.nn.Module.get_extra_state for m in modules):
        return "a model has `get_extra_state`"
    if sum(buffer.nbytes for buffer in buffers) > _MAX_BUFFER_BYTES:
        return f"the buffers have more than {_MAX_BUFFER_BYTES // 1024**2} MB"
    return ""
