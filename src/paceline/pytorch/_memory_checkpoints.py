"""States between checkpoints: in memory that outlives processes, and of survivors."""

import fcntl
import logging
import math
import mmap
import os
import pickle
import shutil
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline._base.files import opened_directory
from paceline._base.process_and_network import num_cores
from paceline._base.run_memory import MEMORY_DIRECTORY_VARIABLE, memory_root
from paceline._training.engine.checkpoints.checkpoint_saver import CheckpointSaver
from paceline._training.engine.checkpoints.state_format import save_state
from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.workers.channels import on_rank_lost
from paceline._training.workers.shared_memory import available_bytes
from paceline.core._background_checkpoints import CheckpointParts, StoreFailures
from paceline.core._core_context import Context
from paceline.core._exceptions import DistributedError, DistributedPeerError
from paceline.pytorch._loop_agreement import RankWish
from paceline.storage._checkpoint_errors import CheckpointError
from paceline.storage._checkpoint_storage import series_uuid

if TYPE_CHECKING:
    from paceline.pytorch._resumable_training import ResumableTraining

logger = logging.getLogger(__name__)


_HEADER = struct.Struct("<qqQ")
_NO_STEP = -1
_MAX_BUFFER_BYTES = 8 * 1024 * 1024
_SPARE_SLOT_BYTES = 64 * 1024
_MAX_STRIDE = 1 << 20
_SAVED = "saved"
# How much the newest duration counts in the mean.
_NEWEST_SHARE = 0.1

Buffers = list[dict[str, torch.Tensor]]


class SmallState(NamedTuple):
    """What is small of a state at a boundary between two batches, on one rank.

    Attributes:
        own: The rank's own part of a checkpoint, without buffers.
        training: Entries of the part "training".
        groups: The settings of each optimizer's parameter groups.
        buffers: The buffers of each model.
    """

    own: dict[str, Any]
    training: dict[str, Any]
    groups: list[list[dict[str, Any]]]
    buffers: Buffers


class _Pickler(pickle.Pickler):
    """Pickler of tensors as arrays, in a fraction of the time."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is made of an array."""
        if type(value) is torch.Tensor and value.dtype is not torch.bfloat16:
            return torch.from_numpy, (value.detach().numpy(),)
        return NotImplemented


class _Slots:
    """File with a rank's data of its last two steps, which outlives the rank."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._size = -(-(_HEADER.size + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._next = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            # A write to a map of a full file system would end this process.
            os.posix_fallocate(descriptor, 0, 2 * self._size)
            self._map = mmap.mmap(descriptor, 2 * self._size)
        finally:
            os.close(descriptor)

    def write(self, step: int, data: memoryview) -> None:
        """Replace the data of the older step.

        Raises:
            OSError: They have become too large.
        """
        start, self._next = self._next * self._size, 1 - self._next
        begin = start + _HEADER.size
        if begin + len(data) > start + self._size:
            raise OSError(f"the state of a rank has grown to {len(data)} bytes")
        _HEADER.pack_into(self._map, start, _NO_STEP, 0, 0)
        self._map[begin : begin + len(data)] = data
        digest = xxhash.xxh3_64_intdigest(data, step)
        _HEADER.pack_into(self._map, start, step, len(data), digest)


def _data_of(content: bytes, step: int) -> bytes | None:
    """Return the data of a step in the content of a file of slots, if they are whole there."""
    half = len(content) // 2
    for start in (0, half) if half > _HEADER.size else ():
        found, size, digest = _HEADER.unpack_from(content, start)
        data = content[start + _HEADER.size : start + half][: max(size, 0)]
        if found == step and xxhash.xxh3_64_intdigest(data, step) == digest:
            return data
    return None


class BoundaryStates:
    """Small states of all ranks at the boundaries between batches, and the survivors' use of them.

    In plain data-parallel training, ranks have the same weights and optimizer states. What differs
    is small, and each rank notes it in memory at each boundary at which no gradient is open. When
    a rank is lost before a survivor's next optimizer step, that survivor still has the weights of
    its last boundary. If all ranks have noted this one, they are a whole state.

    Args:
        stepper: The models and optimizers.
        training: The training; its owner keeps it alive.
        directory: Where the ranks of this start have their files.
        place: This rank, and the number of ranks.
        share: The share of time that notes may take.
    """

    def __init__(
        self,
        stepper: Stepper,
        training: "ResumableTraining",
        directory: Path,
        place: tuple[int, int],
        share: float,
    ) -> None:
        self._stepper, self._directory, self._share = stepper, directory, share
        self._training: ResumableTraining = weakref.proxy(training)
        self._rank, self._world_size = place
        self._slots: _Slots | None = None
        self._step, self._stride = _NO_STEP, 1
        # The time of a note, as a multiple of the share of a batch that it may take.
        self._cost = self._noted_s = 0.0
        self._is_closed, self._has_stepped = False, True
        self._parameters = stepper.parameters()
        self._samples = _samples(self._parameters)
        self._sampled: Any = None
        self._num_states: list[int] = []
        self._watched: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._places = [
            [
                (f"{prefix}.{name}".lstrip("."), module._buffers, name)
                for prefix, module in plain_model(model).named_modules()
                for name in module._buffers
            ]
            for model in stepper.models
        ]
        # Also for optimizers that nobody knows here.
        self._hooks: list[Any] = [register_optimizer_step_pre_hook(self._note_step)]
        self._thread = 0
        on_rank_lost.append(self._interrupt)

    def _note_step(self, *_: object) -> None:
        self._has_stepped = True

    def _interrupt(self) -> None:
        """Have the present batch raise soon, as it cannot be completed; runs in another thread."""
        self._hooks.append(register_module_forward_pre_hook(self._raise_loss))
        for parameter in self._parameters:
            if parameter.requires_grad and parameter.is_leaf and not self._is_closed:
                # A backward pass that has begun looks for this hook at each gradient. It is one
                # pointer: hooks before gradients are a list, which the pass may be reading.
                hook: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(hook(self._raise_loss))

    def _raise_loss(self, *_: object) -> None:
        is_mine = threading.get_ident() == self._thread and self._stepper.calls.is_in_batch
        # After an optimizer step, the state to be kept is another one.
        if is_mine and not self._has_stepped and not self._is_closed:
            raise DistributedPeerError(
                "All ranks must take part in the sum of the gradients, but one is lost."
            )

    def note(self, step: int) -> None:
        """Note the state after so many batches, unless gradients are open or it costs too much."""
        if self._is_closed or step % self._stride or step == self._step:
            return
        if any(parameter.grad is not None for parameter in self._parameters):
            return
        began_s = time.perf_counter()
        try:
            self._note(step)
        except (OSError, pickle.PicklingError, RuntimeError, TypeError, ValueError) as error:
            logger.info("Surviving ranks will not save their states: %s.", error)
            self.close()
        else:
            self._pace(step, began_s)
            self._step = step

    def _note(self, step: int) -> None:
        buffers = [
            {name: owner[key] for name, owner, key in each if owner[key] is not None}
            for each in self._places
        ]
        file = BytesIO()
        state = self._training.small_state(buffers)
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(tuple(state))
        data = file.getbuffer()
        if self._slots is None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._directory / str(self._rank)
            self._slots = _Slots(path, 2 * len(data) + _SPARE_SLOT_BYTES)
        self._slots.write(step, data)
        optimizers = self._stepper.optimizers
        if (num_states := [len(each.state) for each in optimizers]) != self._num_states:
            self._num_states = num_states
            values = [v for o in optimizers for s in o.state.values() for v in s.values()]
            self._watched = [*self._parameters, *(v for v in values if type(v) is torch.Tensor)]
        self._versions = [tensor._version for tensor in self._watched]
        self._sampled = torch.cat(self._samples)
        self._thread = threading.get_ident()
        self._has_stepped = False

    def _pace(self, step: int, began_s: float) -> None:
        """Set after how many batches the next note comes: a power of 2, so that ranks agree."""
        noted_s, self._noted_s = self._noted_s, time.perf_counter()
        if self._step == _NO_STEP:
            # The first note makes the file.
            return
        batch_s = (self._noted_s - noted_s) / (step - self._step)
        newest = (self._noted_s - began_s) / (self._share * batch_s)
        self._cost += (_NEWEST_SHARE if self._cost else 1.0) * (newest - self._cost)
        self._stride = 1 << math.ceil(math.log2(min(max(self._cost, 1.0), _MAX_STRIDE)))

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
            if len(states) < self._world_size:
                return False
            parts, metadata = self._training.captured_at(states)

            def write(path: Path) -> None:
                # Side by side, as the lost rank has left its processor.
                with ThreadPoolExecutor() as pool:
                    for written in [pool.submit(save_state, p, path, n) for n, p in parts.items()]:
                        written.result()

            store(metadata, write)
            (self._directory / _SAVED).touch()
        text = "Another rank is lost. Rank %d keeps the state after step %d for the next start."
        logger.warning(text, self._rank, self._step)
        return True

    def _is_unchanged(self) -> bool:
        """Tell whether weights and optimizer states are those of the last boundary."""
        if self._step == _NO_STEP or self._has_stepped or not self._stepper.accumulation.is_even:
            return False
        parameters = self._stepper.parameters()
        return (
            [*map(id, parameters)] == [*map(id, self._parameters)]
            and [tensor._version for tensor in self._watched] == self._versions
            # Changes of `parameter.data` have no version.
            and torch.equal(torch.cat(_samples(parameters)), self._sampled)
        )

    def read(self, rank: int) -> SmallState | None:
        """Return what a rank has noted at this rank's last boundary, or None."""
        path = self._directory / str(rank)
        data = _data_of(path.read_bytes(), self._step) if path.is_file() else None
        # Written by a rank of this run, in a directory of this user alone.
        return None if data is None else SmallState(*pickle.loads(data))  # noqa: S301

    def close(self) -> None:
        """Note no more states."""
        self._is_closed, self._step = True, _NO_STEP
        if self._interrupt in on_rank_lost:
            on_rank_lost.remove(self._interrupt)
        for hook in self._hooks[:]:
            hook.remove()


def _samples(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the first element of each parameter, as views of its memory."""
    return [p.detach().as_strided((1,), (1,), p.storage_offset()) for p in parameters if p.numel()]


def survivors_problem(stepper: Stepper) -> str:
    """Return why survivors cannot save the state of all ranks; empty if they can."""
    modules = [module for model in stepper.models for module in plain_model(model).modules()]
    buffers = [each for module in modules for each in module._buffers.values() if each is not None]
    tensors = [*stepper.parameters(), *buffers]
    is_plain = all(type(each.data) is torch.Tensor and each.is_cpu for each in tensors)
    has_extra = any(type(m).get_extra_state is not torch.nn.Module.get_extra_state for m in modules)
    problems = {
        "ranks divide models, or sum gradients by Horovod": stepper.is_divided
        or stepper.all_reduce is not None,
        "a model has lazy parameters, or is not on the CPU": not is_plain
        or any(map(torch.nn.parameter.is_lazy, tensors)),
        "a model has `get_extra_state`": has_extra,
        "the buffers have more than 8 MB": sum(b.nbytes for b in buffers) > _MAX_BUFFER_BYTES,
    }
    return next((problem for problem, is_so in problems.items() if is_so), "")


if TYPE_CHECKING:
    from paceline.pytorch._resumable_training import ResumableTraining


_SHARE = 0.02
_LEAST_INTERVAL_S = 0.25
# The newest whole state, and the one that is being written.
_NUM_SLOTS = 2
# Memory that other programs keep.
_SPARE_BYTES = 256 * 1024 * 1024
# After an error, other ranks may never store their parts.
_PARTS_AFTER_ERROR_S = 1.0
# For how long a rank that is asked to leave waits for each state in memory: the checkpoint needs
# the rest of the time from a notice to the kill, which Slurm makes 30 s.
_LEAVING_S = 5.0


def checked_memory(given: Any) -> float | None:
    """Return the share of time or the seconds of `memory_checkpoints`; None if it is off.

    Raises:
        ValueError: It is neither a bool nor a number above 0.
    """
    if given is None or isinstance(given, bool):
        return _SHARE if given else None
    if not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise ValueError(
            "`memory_checkpoints` must be True, seconds, or a share of the time below 1, but got"
            f" {given!r}. Hint: memory_checkpoints=True is at most {_SHARE:.0%} of the time."
        )
    return float(given)


class MemoryFailures(StoreFailures):
    """Failures of states in memory: training continues, and the memory is given up."""

    @property
    def error(self) -> BaseException | None:
        """The first failure, or None."""
        return self._newest

    def note_stored(self) -> None:
        """Do nothing: a failure is final."""

    def note_lost(self, error: BaseException) -> None:
        """Record a failure of the memory; raise an error of the user's own hooks."""
        if not isinstance(error, (CheckpointError, OSError)):
            raise error
        self._newest = self._newest or error


class MemoryCheckpoints:
    """Saver of states to memory: each rank copies its part, the chief commits whole states.

    The newest whole state is kept until the next one is whole. After a failure, such as full
    memory, all ranks give it up, and training continues.

    Args:
        core: The core context.
        parts: Where the parts go.
        failures: What `parts` reports failures to.
        every: Seconds between two states, or a share of the time that they may cost, below 1.
        series: The UUID from which those of the states follow, the same on all ranks.

    Attributes:
        boundaries: The small states between batches, if survivors of a lost rank can use them.
    """

    def __init__(
        self,
        core: Context,
        parts: CheckpointParts,
        failures: MemoryFailures,
        every: float,
        series: str,
    ) -> None:
        self._distributed = core.distributed
        assert parts.directory is not None
        self._directory = parts.directory
        self._parts, self._failures, self._series = parts, failures, series
        local_size = core.distributed.local_size
        self._saver = CheckpointSaver(core.distributed.rank, local_size, failures)
        self._every = every
        # A busy processor takes its share of the time of all ranks here.
        self._processor_share = min(1.0, local_size / num_cores())
        self._begun_s, self._stall_s = -math.inf, 0.0
        self._num_saves = 0
        self.boundaries: BoundaryStates | None = None

    def note_boundaries(
        self, stepper: Stepper, training: "ResumableTraining", *, has_hooks: bool
    ) -> None:
        """Have survivors of a lost rank save the state of the last boundary, if they can.

        Args:
            stepper: The models and optimizers.
            training: The training.
            has_hooks: Whether callbacks add to checkpoints.
        """
        place = self._distributed.rank, self._distributed.size
        problem = "callbacks add to checkpoints" if has_hooks else survivors_problem(stepper)
        if self._distributed.cross_size > 1:
            problem = "the ranks are on several nodes"
        if problem and place[1] > 1:
            logger.info("Surviving ranks will not save their states: %s.", problem)
        elif place[1] > 1:
            path = self._directory / f"boundaries-{self._series}"
            share = (self._every if self._every < 1 else _SHARE) / 2
            self.boundaries = BoundaryStates(stepper, training, path, place, share)

    def wish(self) -> RankWish:
        """Return what this rank wants: nothing, the next state in memory, or to give it up."""
        self._saver.check()
        try:
            self._parts.check()
        except CheckpointError as error:
            self._failures.note_lost(error)
        if self._failures.error is not None:
            return RankWish.DROP
        is_busy = self._saver.is_storing or self._parts.num_pending
        is_chief = self._distributed.rank == 0
        return RankWish.KEEP if is_chief and not is_busy and self._is_due() else RankWish.NONE

    def leaving_wish(self) -> RankWish:
        """Return what this rank wants before it leaves, once the state before is whole."""
        self.settle()
        self._begun_s = -math.inf
        return self.wish()

    def settle(self) -> None:
        """Wait until the newest state is whole, but for some seconds at most."""
        with suppress(CheckpointError, OSError):
            self._saver.settle()
            self._parts.finish(timeout_s=_LEAVING_S)

    def _is_due(self) -> bool:
        interval_s = self._every
        if (share := self._every) < 1:
            # The other half is for what survivors need to save the state of the last step.
            share /= 1 if self.boundaries is None else 2
            processor_s = self._saver.processor_s + self._parts.copy_s
            cost_s = self._stall_s + processor_s * self._processor_share
            interval_s = max(_LEAST_INTERVAL_S, cost_s / share)
        return time.monotonic() >= self._begun_s + interval_s

    @contextmanager
    def paced(self) -> Iterator[None]:
        """Count the time of a block that saves a state."""
        self._begun_s = time.monotonic()
        try:
            yield
        finally:
            self._stall_s = time.monotonic() - self._begun_s

    def save(
        self, parts: dict[str, Any], metadata: Mapping[str, Any], write_more: Callable[[Path], None]
    ) -> None:
        """Copy this rank's part, and store the copy in the background; all ranks call it.

        Args:
            parts: The state.
            metadata: The facts of the state.
            write_more: Called in the thread with the directory before the commit.
        """
        self._num_saves += 1
        destination = self._parts.store(series_uuid(self._series, self._num_saves), metadata)
        self._saver.save(parts, destination, write_more, has_room=self._has_room)

    def _has_room(self, num_bytes: int) -> bool:
        if self._num_saves > 1:
            return True
        node, number = self._distributed.cross_rank, self._distributed.cross_size
        by_rank = self._distributed.allgather((node, num_bytes, _room(self._directory)))
        own = Counter[int]()
        for each, size, _ in by_rank:
            own[each] += size
        # A node also holds the files of the node before it.
        before = {each: own[(each - 1) % number] if number > 1 else 0 for each in own}
        wanted = {each: _NUM_SLOTS * (own[each] + before[each]) for each in own}
        short = [(wanted[each], room) for each, _, room in by_rank if wanted[each] > room]
        for size, room in short[:1]:
            self._failures.note_lost(
                OSError(
                    f"{_NUM_SLOTS} states need {size / 1e6:.0f} MB in {str(memory_root())!r}, but"
                    f" {max(room, 0) / 1e6:.0f} MB are free. Hint: make it larger, or name another"
                    f" directory by {MEMORY_DIRECTORY_VARIABLE}."
                )
            )
        return not short

    def drop(self) -> None:
        """Give the memory up; all ranks call it."""
        error = self._failures.error
        # All ranks see a lack of room at once.
        errors = self._distributed.allgather(None if error is None else str(error))
        if error is not None and errors.index(str(error)) == self._distributed.rank:
            logger.warning(
                "States are no longer kept in memory, and training goes on with its stored"
                " checkpoints alone. %s",
                error,
            )
        self._end()
        if self.boundaries is not None:
            self.boundaries.close()
        # No rank writes any more.
        self._distributed.allgather(None)
        self._clear()

    def finish(self, error: BaseException | None) -> None:
        """End with the training; after an error the newest state stays for the next processes.

        Args:
            error: The error that ended the training, if it failed.
        """
        if error is None:
            self._end()
            self._clear()
        elif not isinstance(error, KeyboardInterrupt) and not self._save_boundary(error):
            with suppress(CheckpointError, OSError):
                self._saver.finish()
                self._parts.finish(timeout_s=_PARTS_AFTER_ERROR_S)
        if self.boundaries is not None:
            self.boundaries.close()
        self._parts.close()

    def _save_boundary(self, error: BaseException) -> bool:
        if self.boundaries is None:
            return False
        try:
            return self.boundaries.save(error, self._parts.store_whole, _free(self._directory))
        except Exception as problem:
            # The error of the training is the one to be seen.
            logger.warning("The state of this rank cannot be kept in memory. %s", problem)
            return False

    def _end(self) -> None:
        with suppress(CheckpointError, OSError):
            self._saver.finish()
        self._parts.close()

    def _clear(self) -> None:
        if self._distributed.local_rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)


def _room(directory: Path) -> int:
    """Return how many bytes states may take, with those of a state that is there from before."""
    return _free(directory) + sum(path.stat().st_size for path in directory.glob("*/*"))


def _free(directory: Path) -> int:
    facts = os.statvfs(directory.parent)
    room = facts.f_bavail * facts.f_frsize
    if not os.environ.get(MEMORY_DIRECTORY_VARIABLE):
        room = min(room, available_bytes() - _SPARE_BYTES)
    return room


def begin_memory(core: Context, every: float | None) -> MemoryCheckpoints | None:
    """Return the saver of states to memory, the same on all ranks; None where there is none.

    Args:
        core: The core context.
        every: See `MemoryCheckpoints`; None for no such states.
    """
    if every is None:
        return None
    failures = MemoryFailures()
    parts = core.checkpoint.memory_parts(failures)
    series = "" if parts is None else parts.new_series()
    if not all(all_series := core.distributed.allgather(series)):
        if core.distributed.rank == 0:
            logger.warning(
                "`memory_checkpoints` has no effect: memory for states must belong to a process"
                " that starts lost workers again, on each node. Hint: `python -m"
                " paceline.launch.torch_distributed --max-restarts 3 ...`, or"
                " `pytorch.launch(..., max_restarts=3)`; %s must be there.",
                memory_root(),
            )
        return None
    assert parts is not None
    return MemoryCheckpoints(core, parts, failures, every, all_series[0])
