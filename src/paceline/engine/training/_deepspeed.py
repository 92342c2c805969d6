"""Training by DeepSpeed's engines, which hold models and optimizers and sum gradients themselves.

Only `import_deepspeed` imports DeepSpeed. A checkpoint has a directory ``deepspeed_<i>`` for each
engine, with the files that its `save_checkpoint` writes on every rank, beside the engine's own
parts.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.core import DistributedContext
from paceline.engine.checkpoints._background_saver import Destination
from paceline.engine.devices._precision import Precision
from paceline.engine.optimizer_steps._stepper import Stepper
from paceline.engine.optimizer_steps._watched_user_calls import WatchedUserCalls
from paceline.engine.parallel._data_parallel import DataParallel
from paceline.engine.parallel._flat_all_reduce import FlatReduction
from paceline.engine.state._buffers_and_gradients import load_buffers
from paceline.engine.state._load_models import check_numbers
from paceline.engine.state._models_and_optimizers import ModelsAndOptimizers
from paceline.engine.state._rank_differences import RankCheck
from paceline.engine.training._training_loop import TrainingLoop
from paceline.engine.training._training_state import TrainingState
from paceline.storage import CheckpointMismatchError

_TAG = "state"


class DeepSpeedStepper(Stepper):
    """The DeepSpeed engines of a training.

    A global batch has as many shards as an optimizer step has micro-batches on all ranks, so that
    each batch ends with an optimizer step of each engine.

    Args:
        distributed: Where the ranks meet.
        device: The device of this rank.
    """

    def __init__(self, distributed: DistributedContext, device: torch.device) -> None:
        # The engines divide what all ranks would have.
        super().__init__(distributed, device, rank_check=RankCheck(False))
        # For the profiler: ranks may wait for each other in all of `train_batch`.
        self.data_parallel = DataParallel.FSDP
        self.engines: list[Any] = []
        self.calls = _UnwatchedCalls(self, distributed.size)
        self._words = FlatReduction([], device)

    def use_precision(self, precision: Precision) -> None:
        """Leave the number format to the engines.

        Raises:
            ValueError: It is another one than fp32.
        """
        if precision is not Precision.FP32:
            raise ValueError(
                "The number format of DeepSpeed's engines must be set in their config, but"
                f' `precision` is {precision.value!r}. Hint: its section "bf16" or "fp16".'
            )
        super().use_precision(precision)

    def add_engine(self, engine: Any) -> None:
        """Have an engine checkpointed."""
        self.engines.append(engine)
        self.models.append(engine)

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches each rank trains for an optimizer step."""
        return int(self.engines[0].gradient_accumulation_steps())

    @property
    def divides_parameters(self) -> bool:
        """Whether all ranks must run each forward pass together, as with ZeRO stage 3."""
        return any(engine.zero_optimization_partition_weights() for engine in self.engines)

    def begin_shard(self) -> None:
        """Check that all ranks have a shard.

        Raises:
            RuntimeError: One has none.
        """
        if not self.accumulation.is_even:
            raise RuntimeError(_incomplete("a rank has none"))

    def step_without_data(self) -> None:
        """Refuse a batch of which this rank has no samples.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(_incomplete("this rank has none"))

    def finish_batch(self) -> bool:
        """Tell the other ranks what this one has to say; the engines have stepped by now.

        Raises:
            RuntimeError: An engine is in the middle of an optimizer step.
        """
        for engine in self.engines:
            num_open = engine.micro_steps % engine.gradient_accumulation_steps()
            if num_open and engine.managed_gradient_accumulation():
                raise RuntimeError(_incomplete(f"{num_open} were stepped"))
        self.accumulation.num_steps += 1
        if self._distributed.size > 1:
            self.sum_over_ranks(self._words)
            self._has_told = False
        return True

    # ---- checkpoints ---------------------------------------------------------------------

    def store(self, destination: Destination) -> Destination:
        """Have the engines write to a checkpoint now, and return what is to be left later.

        All ranks call it, as the engines wait for each other.

        Args:
            destination: Where this rank's files of the checkpoint go.
        """
        with ExitStack() as stack:
            path, uuid = stack.enter_context(destination)
            for index, engine in enumerate(self.engines):
                directory = path / f"deepspeed_{index}"
                # DeepSpeed makes it on rank 0 only, where all ranks would share it.
                directory.mkdir()
                engine.save_checkpoint(str(directory), tag=_TAG)
                if not any(directory.iterdir()):
                    directory.rmdir()
            return _entered((path, uuid), stack.pop_all())

    def load(self, path: Path, training: Mapping[str, Any]) -> None:
        """Put back what the engines have written.

        Args:
            path: The checkpoint's directory.
            training: What the checkpoint holds as "training".

        Raises:
            CheckpointMismatchError: It was stored by another number of ranks, or by other engines.
        """
        stored = training.get("deepspeed")
        if stored is None:
            raise CheckpointMismatchError(
                "The checkpoint must hold DeepSpeed's engines, but a trial without DeepSpeed stored"
                " it. Hint: go on with the code that stored it."
            )
        size = self._distributed.size
        if training["world_size"] != size:
            raise CheckpointMismatchError(
                "DeepSpeed's checkpoints can only be loaded by the number of ranks that stored"
                f" them, which is {training['world_size']}, but here are {size}. Hint: start"
                f" {training['world_size']} ranks, or begin a new run with the weights that"
                " `zero_to_fp32.py` of the checkpoint puts together."
            )
        check_numbers("engine", stored["engines"], self.engines)
        for index, (then, now) in enumerate(zip(stored["engines"], self._facts(), strict=True)):
            for name, value in then.items():
                if now.get(name) != value:
                    raise CheckpointMismatchError(
                        f"`{name}` of engine {index} must be {value!r}, as in the checkpoint, but"
                        f" got {now.get(name)!r}. Hint: go on with the config of DeepSpeed that"
                        " stored it."
                    )
        for index, engine in enumerate(self.engines):
            loaded, _ = engine.load_checkpoint(str(path / f"deepspeed_{index}"), tag=_TAG)
            if loaded is None:
                raise CheckpointMismatchError(
                    f"DeepSpeed could not load engine {index} from {str(path)!r}; its output says"
                    " why."
                )

    def _facts(self) -> list[dict[str, Any]]:
        return [
            {
                "zero_stage": int(engine.zero_optimization_stage()),
                "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
            }
            for engine in self.engines
        ]

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint must tell of the engines."""
        return {"engines": self._facts()}


class DeepSpeedState(TrainingState):
    """The state of a training by DeepSpeed's engines, but for what they store themselves."""

    _stepper: DeepSpeedStepper

    def restore_own(
        self, parts: Mapping[str, Any], loop: TrainingLoop, *, is_same_size: bool
    ) -> None:
        """Put back what this rank alone knew, with buffers such as running means."""
        for engine, buffers in zip(self._stepper.engines, parts["rank"]["buffers"], strict=True):
            load_buffers(engine.module, buffers)
        super().restore_own(parts, loop, is_same_size=is_same_size)

    def _objects(self) -> ModelsAndOptimizers:
        return replace(super()._objects(), models=(), optimizers=(), parameters=(), bases=())

    def _shared(
        self, objects: ModelsAndOptimizers, loop: TrainingLoop, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        return super()._shared(objects, loop, {**facts, "deepspeed": self._stepper.facts()})

    def _own(self, objects: ModelsAndOptimizers, loop: TrainingLoop) -> dict[str, Any]:
        # DeepSpeed keeps those of one rank only, unless parameters are divided.
        buffers = [dict(engine.module.named_buffers()) for engine in self._stepper.engines]
        return {**super()._own(objects, loop), "buffers": buffers}


class _UnwatchedCalls(WatchedUserCalls):
    """Backward passes and optimizer steps are those of the engines, which need no watching."""

    def begin(self, num_shards: int) -> None:
        """Watch nothing."""

    def enter_batch(self) -> None:
        """Watch nothing."""


@contextmanager
def _entered(values: tuple[Path, str], stack: ExitStack) -> Iterator[tuple[Path, str]]:
    with stack:
        yield values


def _incomplete(what: str) -> str:
    return (
        "With DeepSpeed each global batch must have `gradient_accumulation_steps` micro-batches on"
        f" each rank, and `train_batch` must step each engine once for each, but {what}. Hint:"
        " engine.backward(loss), then engine.step(), in every call; and data without a length must"
        " give every rank whole global batches."
    )


def import_deepspeed() -> Any:
    """Return the package of DeepSpeed.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ImportError(
            "`pytorch.deepspeed` needs the package `deepspeed`, which is not installed. Hint:"
            " DS_BUILD_OPS=0 pip install deepspeed; see docs/backends.md."
        ) from None
    return deepspeed


def join_deepspeed(
    deepspeed: Any, distributed: DistributedContext | None, device: torch.device | None
) -> None:
    """Tell DeepSpeed of the process group, which a process that works alone gets now."""
    if not dist.is_initialized():
        is_on_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
        backend = "nccl" if is_on_gpu else "gloo"
        store: Any = dist.HashStore()  # type: ignore[attr-defined]  # missing in torch's stubs
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    local_rank = 0 if distributed is None else distributed.local_rank
    # Whatever the launcher was, DeepSpeed reads it here.
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
