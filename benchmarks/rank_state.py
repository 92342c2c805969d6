"""The part of `rank_saves.py` that one rank runs."""

import ctypes
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from memory_peak import MemoryPeak
from save_ways import transformer_weights, warm_adam
from step_loops import ON_CPU
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch
from paceline.core import read_checkpoints
from paceline.journal import RunDirectory

Times = dict[str, list[float]]

# Batches between the begin of one way and that of the next, and how long each works.
_PHASE, _WORK_S = 20, 0.005
_NUM_COPIES = 10
# The first round has to get its memory first.
_MIN_ROUNDS = 2
_BUCKET = "s3://checkpoints/bench"
_DCP, _DCP_ASYNC, _ASIDE = "dcp", "dcp_async", ".aside"


class Large(torch.nn.Module):
    """Weights that no forward pass uses, so that they are never gathered."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weights = transformer_weights(num_bytes, "cpu")

    def forward(self) -> None:
        """Do nothing; torch shards modules with a forward pass alone."""


class Model(torch.nn.Module):
    """A layer that is trained, beside large weights."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.large = Large(num_bytes)
        self.small = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        return self.small(x)


class _Done(Exception):
    """Raised when all is measured."""


class SavingTrial(pytorch.PyTorchTrial):
    """Batches of some milliseconds beside a large state, stored by one way after the other."""

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        num_bytes: int,
        num_rounds: int,
        ways: Sequence[str],
        limit_s: float = math.inf,
    ) -> None:
        self.context = context
        self.is_over = time_limit(limit_s)
        self.ways = (*ways, "copy") if "obstore" in ways else (*ways, "write", "copy")
        self.period = _PHASE * len(self.ways)
        self.num_batches = self.period * num_rounds + _PHASE
        model = Model(num_bytes)
        self.model = context.wrap_model(model, shard_units=Large)
        self.optimizer = context.wrap_optimizer(warm_adam(self.model))
        self.times: Times = {"own bytes": [sum(t.nbytes for t in self.own_tensors())]}
        self.peak = MemoryPeak(ON_CPU)
        self.num_stored = self.num_saved = 0
        self.buffer = torch.ones(int(self.times["own bytes"][0]) // 4)
        self.target = torch.ones_like(self.buffer)
        self.end = 0.0
        self.bare_moves: list[tuple[int, int, int]] | None = None

    def state(self) -> dict[str, Any]:
        """Return the whole state as torch gives it."""
        return {"model": self.model.state_dict(), "adam": self.optimizer.state_dict()}

    def own_tensors(self) -> list[torch.Tensor]:
        """Return what this rank has to store: its pieces, or all of it on the chief."""
        moments = [list(each.values()) for each in self.optimizer.state.values()]
        tensors = [*self.model.state_dict().values(), *(t for each in moments for t in each)]
        locals_ = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        is_divided = any(hasattr(t, "to_local") for t in tensors)
        return locals_ if is_divided or self.context.distributed.rank == 0 else locals_[:1]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Train; before that store, if a way is due."""
        index, is_inside = divmod(batch_idx, _PHASE)
        if self.bare_moves is not None and is_inside:
            self.copy_barely()
        if batch_idx and not is_inside:
            self.bare_moves = None
            way = self.ways[index % len(self.ways)]
            if way == "paceline":
                self.add(way, time.perf_counter() - self.end)
                self.num_stored += 1
                self.num_saved += 1
                self.finish(way, self.end, self.is_stored)
            else:
                self.save(way)
            if self.ways[(index + 1) % len(self.ways)] == "paceline":
                self.peak.start()
        time.sleep(_WORK_S)
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        num_rounds, num_left = divmod(batch_idx + 1, self.period)
        if num_left == _PHASE and (
            batch_idx + 1 == self.num_batches or (num_rounds >= _MIN_ROUNDS and self.is_over())
        ):
            raise _Done
        if (batch_idx + 1) % _PHASE == 0 or self.bare_moves is not None:
            dist_barrier()
        self.end = time.perf_counter()
        return {"loss": loss}

    def copy_barely(self) -> None:
        """Move the memory of all tensors, and nothing else, as all other ranks do at once.

        It happens where a save would: after the batch, in which a rank waits for the others. So it
        shares cores and caches as a save does.
        """
        for move in self.bare_moves or ():
            ctypes.memmove(*move)
        self.add("bare copy", time.perf_counter() - self.end)

    def add(self, name: str, value: float) -> None:
        """Keep one value."""
        self.times.setdefault(name, []).append(value)

    def is_stored(self) -> bool:
        """Tell whether the newest checkpoint is committed.

        The chief sees it in its journal: to ask the store again and again would keep it busy. The
        others wait for the chief.
        """
        if self.context.distributed.rank:
            return True
        return len(read_checkpoints(RunDirectory(self.context.core.run_dir))) >= self.num_saved

    def finish(self, way: str, begin: float, is_done: Callable[[], bool]) -> None:
        """Wait until all ranks' parts are stored, and keep the time and the memory."""
        while not is_done():
            time.sleep(0.002)
        dist_barrier()
        self.add(f"{way}, in all", time.perf_counter() - begin)
        for where, num_bytes in self.peak.stop().items():
            self.add(f"{way}, {where} bytes", num_bytes)
        if self.num_stored > 1 and way == "paceline" and self.context.distributed.rank == 0:
            _remove_older(self.context.core.checkpoint.storage)
            self.num_stored = 1
        if way == "paceline":
            self.num_stored = 1
            dist_barrier()

    def save(self, way: str) -> None:
        """Store by another way than Paceline's."""
        if way == "copy":
            for _ in range(_NUM_COPIES):
                begin = time.perf_counter()
                self.target.copy_(self.buffer)
                self.add("copy", time.perf_counter() - begin)
            to = self.target.data_ptr()
            self.bare_moves = []
            for tensor in self.own_tensors():
                self.bare_moves.append((to, tensor.data_ptr(), tensor.nbytes))
                to += tensor.nbytes
            return
        rank = self.context.distributed.rank
        _set_aside(way, rank)
        self.peak.start()
        begin = time.perf_counter()
        if way == "dcp.save":
            dcp.save(self.state(), checkpoint_id=_DCP)
            self.add(way, time.perf_counter() - begin)
        elif way == "dcp.async_save":
            future = dcp.async_save(self.state(), checkpoint_id=_DCP_ASYNC)
            self.add(way, time.perf_counter() - begin)
            future.result()
        elif way == "torch.save":
            _write_durably(_torch_file(rank), lambda file: torch.save(self.own_tensors(), file))
            self.add(way, time.perf_counter() - begin)
        elif way == "write":
            data = self.buffer.numpy().data.cast("B")
            _write_durably(_plain_file(rank), lambda file: file.write(data))
        else:
            import obstore
            from obstore.store import S3Store

            store = S3Store.from_url(_BUCKET, client_options={"allow_http": True})
            path = Path(f"part_{rank}")
            path.write_bytes(self.buffer.numpy().data.cast("B"))
            # To write the file first is Paceline's way too, and not the client's part of it.
            begin = time.perf_counter()
            obstore.put(store, f"plain_{rank}", path)
            self.add(way, time.perf_counter() - begin)
        self.finish(way, begin, lambda: True)
        if rank == 0:
            _remove_set_aside()

    def evaluate_batch(self, batch: Any) -> Any:
        """Return a loss."""
        return {"loss": self.model(batch[0]).mean()}

    def build_training_data_loader(self) -> Any:
        """Return one sample a batch and rank."""
        size = self.context.distributed.size
        return DataLoader(TensorDataset(torch.randn(self.num_batches * size, 4)))

    def build_validation_data_loader(self) -> Any:
        """Return one batch a rank."""
        return DataLoader(TensorDataset(torch.randn(self.context.distributed.size, 4)))


def time_limit(limit_s: float) -> Callable[[], bool]:
    """Return what tells whether so much time has passed on rank 0, on all ranks at once."""
    end = time.monotonic() + limit_s

    def is_over() -> bool:
        told = torch.tensor(time.monotonic() >= end, dtype=torch.int64)
        if dist.is_initialized():
            dist.broadcast(told, src=0)
        return bool(told)

    return is_over


def dist_barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def save_by_all_ways(
    num_bytes: int,
    num_rounds: int,
    kind: str,
    ways: Sequence[str],
    *,
    is_s3: bool,
    limit_s: float = math.inf,
) -> Times:
    """Store the state by each way in turn; return what the slowest rank needed."""
    with suppress(_Done), _context(kind, is_s3) as context:
        trial = SavingTrial(context, num_bytes, num_rounds, ways, limit_s)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(trial.num_batches),
            checkpoint_period=pytorch.Batch(trial.period),
        )
    storage = context.core.checkpoint.storage
    Path("stored").write_text(storage.list()[-1] + " " + storage.url)
    return _slowest(trial.times)


def load_by_all_ways(
    num_bytes: int,
    num_rounds: int,
    kind: str,
    ways: Sequence[str],
    *,
    is_s3: bool,
    limit_s: float = math.inf,
) -> Times:
    """Load what was stored; return what the slowest rank needed."""
    uuid, url = Path("stored").read_text().split()
    times: Times = {}
    is_over = time_limit(limit_s)
    for number in range(num_rounds):
        with _context(kind, is_s3) as context:
            if number and is_over():
                break
            trial = SavingTrial(context, num_bytes, num_rounds, ways)
            trainer = pytorch.Trainer(trial, context)
            dist_barrier()
            begin = time.perf_counter()
            if is_s3:
                with context.core.checkpoint.storage.restore_path(uuid):
                    pass
            else:
                trainer.restore(Path(url, uuid))
            times.setdefault("paceline, load", []).append(time.perf_counter() - begin)
            if not is_s3:
                dist_barrier()
                begin = time.perf_counter()
                dcp.load(trial.state(), checkpoint_id=_DCP)
                times.setdefault("dcp.save, load", []).append(time.perf_counter() - begin)
                begin = time.perf_counter()
                torch.load(_torch_file(context.distributed.rank))
                times.setdefault("torch.save, load", []).append(time.perf_counter() - begin)
    return _slowest(times)


def _context(kind: str, is_s3: bool) -> Any:
    return pytorch.init(
        hparams={"global_batch_size": int(os.environ["WORLD_SIZE"])},
        name="bench",
        data_parallel=kind,
        checkpoint_storage=_BUCKET if is_s3 else None,
    )


def _slowest(times: Times) -> Times:
    if not dist.is_initialized():
        return times
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, times)
    return {
        name: [max(values) for values in zip(*(each[name] for each in gathered), strict=True)]
        for name in times
    }


def _remove_older(storage: Any) -> None:
    for uuid in storage.list()[:-1]:
        storage.delete(uuid)


def _set_aside(way: str, rank: int) -> None:
    """Rename what a way has stored before, so that it writes new files.

    Paceline never writes over a checkpoint. To write over a file can take less than half the time
    of a new one, as the disk need not find blocks for it.
    """
    names = {"torch.save": _torch_file(rank), "write": _plain_file(rank)}
    if rank == 0:
        names |= {"dcp.save": _DCP, "dcp.async_save": _DCP_ASYNC}
    if way in names and Path(names[way]).exists():
        os.rename(names[way], names[way] + _ASIDE)
    dist_barrier()


def _remove_set_aside() -> None:
    for path in Path().glob(f"*{_ASIDE}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _torch_file(rank: int) -> str:
    return f"torch_{rank}.pt"


def _plain_file(rank: int) -> str:
    return f"plain_{rank}"


def _write_durably(name: str, write: Callable[[Any], object]) -> None:
    with open(name, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
