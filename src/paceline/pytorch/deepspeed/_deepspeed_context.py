"""Context of a trial for DeepSpeed."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from paceline import core
from paceline.engine import DeepSpeedStepper, ReducerSet
from paceline.pytorch._trial_context import PyTorchTrialContext


class DeepSpeedTrialContext(PyTorchTrialContext):
    """Wrap DeepSpeed's engines; made by `pytorch.deepspeed.init()`.

    Models, optimizers, schedulers, precision and accumulation are the engines' own: they come from
    the config of DeepSpeed.

    Args:
        core_context: The core context of this process.
        hparams: The hyperparameters.
        seed: The seed of the trial.
        device: The device of this process; a GPU of its own by default, else the CPU.
        given_seed: The seed that the user gave, if any.
    """

    stepper: DeepSpeedStepper

    def __init__(
        self,
        core_context: core.Context,
        hparams: Mapping[str, Any] | None,
        seed: int,
        *,
        device: torch.device | None = None,
        given_seed: int | None = None,
    ) -> None:
        super().__init__(core_context, hparams, seed, device=device, given_seed=given_seed)
        self.stepper = DeepSpeedStepper(self.distributed, self.device)
        self.reducers = ReducerSet(self.stepper)

    @property
    def engines(self) -> list[Any]:
        """The wrapped engines."""
        return self.stepper.engines

    def wrap_model_engine(self, engine: Any) -> Any:
        """Have an engine trained and checkpointed; returns it unchanged.

        Args:
            engine: What `deepspeed.initialize` returned first.

        Raises:
            TypeError: It is no engine of DeepSpeed, or one for pipelines.
            ValueError: It takes other numbers of micro-batches than an engine before, or its
                parameters are not the same on all ranks, as with tensor parallelism.
        """
        from deepspeed import DeepSpeedEngine, PipelineEngine

        if not isinstance(engine, DeepSpeedEngine) or isinstance(engine, PipelineEngine):
            raise TypeError(
                "`engine` must be a DeepSpeedEngine, and not one of a pipeline, but got a"
                f" {type(engine).__name__}. Hint: engine, *_ = deepspeed.initialize(...)."
            )
        if engine.dp_world_size != self.distributed.size:
            raise ValueError(
                "The engine must train the same model on all ranks, but its data-parallel group has"
                f" {engine.dp_world_size} of {self.distributed.size}. Hint: leave out tensor and"
                " pipeline parallelism."
            )
        num_before = self.stepper.num_micro_batches if self.engines else None
        num = int(engine.gradient_accumulation_steps())
        if num_before not in (None, num):
            raise ValueError(
                "All engines must have the same `gradient_accumulation_steps`, but one has"
                f" {num_before} and another {num}."
            )
        self.stepper.add_engine(engine)
        self.num_shards = self.distributed.size * num
        return engine

    # ---- facts ---------------------------------------------------------------------------

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch, which is the batch size of the data loaders.

        Raises:
            RuntimeError: No engine is wrapped yet.
        """
        return int(self._first_engine().train_micro_batch_size_per_gpu())

    def get_num_micro_batches_per_slot(self) -> int:
        """Return how many micro-batches a rank trains for an optimizer step.

        Raises:
            RuntimeError: No engine is wrapped yet.
        """
        self._first_engine()
        return self.stepper.num_micro_batches

    def get_global_batch_size(self) -> int:
        """Return the samples of an optimizer step on all ranks, from the config of DeepSpeed.

        Raises:
            RuntimeError: No engine is wrapped yet.
        """
        return int(self._first_engine().train_batch_size())

    def _first_engine(self) -> Any:
        if not self.engines:
            raise RuntimeError(
                "An engine must be wrapped first, but none is. Hint: self.engine ="
                " context.wrap_model_engine(engine)."
            )
        return self.engines[0]

    # ---- what the engines do themselves --------------------------------------------------

    def wrap_model(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine has the model."""
        raise _refusal("wrap_model", "context.wrap_model_engine(engine)")

    def wrap_optimizer(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine has the optimizer."""
        raise _refusal("wrap_optimizer", "deepspeed.initialize(optimizer=...)")

    def wrap_lr_scheduler(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine has the scheduler."""
        raise _refusal("wrap_lr_scheduler", "deepspeed.initialize(lr_scheduler=...)")

    def wrap_scaler(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine scales by itself."""
        raise _refusal("wrap_scaler", 'the section "fp16" of the config of DeepSpeed')

    def backward(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine runs its backward pass."""
        raise _refusal("backward", "engine.backward(loss)")

    def step_optimizer(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise: an engine steps its optimizer."""
        raise _refusal("step_optimizer", "engine.step()")


def _refusal(name: str, instead: str) -> RuntimeError:
    return RuntimeError(
        f"`context.{name}` is not for trials with DeepSpeed, whose engines do that themselves."
        f" Hint: {instead}."
    )
