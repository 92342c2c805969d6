"""Messages from a driver to its workers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.engine import ShardUnits
from paceline.workers import ResourcesError

BATCH_SIZE = "*batch_size"
"""The key of a config under which creators find the batch size of one worker.

What the user gives there is the size over all workers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """Specification of what each worker builds; the functions are the user's.

    Attributes:
        config: What each function is given.
        loader_config: What loaders are made with for data sets; None for the default.
        num_shards: The shards of a global batch, one for each worker that was asked for.
        shard_size: The samples of a shard for data sets.
        precision: "fp32", "fp16" or "bf16".
        use_gpu: True, False, or "auto" for a GPU if there is one.
        backend: "gloo", "nccl", or "auto" for what suits the device.
        timeout_s: How long ranks wait for each other, in seconds.
        deals_out: Whether workers share the data; else each has all that its loader gives.
        is_serial: Whether the workers of a node call `data_creator` one after the other.
        seed: The seed of everything.
        data_parallel: "flat" or "fsdp".
        shard_units: With "fsdp", which modules are gathered as a whole.
        shard_precision: With "fsdp", the types of gathered parameters and of sums of gradients.
        stop_on_nan: Whether the default train function stops at a loss that is not finite.
        check_ranks: Whether workers are compared, see `RankCheck`.
    """

    model_creator: Callable[..., Any]
    data_creator: Callable[..., Any]
    optimizer_creator: Callable[..., Any]
    loss_creator: Callable[..., Any] | None
    scheduler_creator: Callable[..., Any] | None
    train_function: Callable[..., Any] | None
    validation_function: Callable[..., Any] | bool | None
    initialization_hook: Callable[..., Any] | None
    scheduler_step_freq: str | None
    config: dict[str, Any]
    loader_config: Mapping[str, Any] | None
    num_shards: int
    shard_size: int
    precision: str
    use_gpu: bool | str
    backend: str
    timeout_s: float
    deals_out: bool
    is_serial: bool
    seed: int
    data_parallel: str = "flat"
    shard_units: ShardUnits = None
    shard_precision: Any = None
    stop_on_nan: bool = True
    check_ranks: bool | tuple[str, ...] = True


class ReplicaPassOrder(NamedTuple):
    """Order for one pass.

    Attributes:
        num_steps: How many batches, or None for the rest of the epoch.
        is_profiled: Whether the parts of each step are timed.
        info: What the user's function is told.
        wants_state: Whether the state after the pass is returned.
        progress_path: The file in which the chief notes how far it is; None for none.
    """

    num_steps: int | None
    is_profiled: bool
    info: dict[str, Any]
    wants_state: bool = False
    progress_path: str | None = None


def check_gpu(*, has_gpu: bool) -> None:
    """Require a GPU for `use_gpu=True`.

    Raises:
        ResourcesError: There is none.
    """
    if not has_gpu:
        raise ResourcesError(
            "With `use_gpu=True` each worker needs a GPU, but there is none. Hint: use_gpu='auto'."
        )
