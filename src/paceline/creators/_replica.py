"""Replica: the state of a worker between passes, and functions that run in workers."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch

from paceline._base.arguments_and_errors import mix_seed
from paceline._training.engine.checkpoints.capture_and_restore import (
    ModelsAndOptimizers,
    restore_generators,
)
from paceline._training.engine.checkpoints.resume_differences import SettingChanges, built_settings
from paceline._training.engine.checkpoints.sharded_tensor_pieces import (
    joined_pieces,
    outline_of,
    take_sharded_tensor_pieces,
    whole_model,
)
from paceline._training.engine.devices import suitable_backend, use_own_device
from paceline._training.engine.fsdp_and_tensor_parallel import check_whole
from paceline._training.engine.own_loop_gradients import GradientSync
from paceline._training.engine.precision import Precision
from paceline._training.engine.rank_differences import RankCheck, check_same_data, compare_in_group
from paceline._training.engine.tensor_copies_and_digests import all_parameters
from paceline._training.engine.verify_steps import StepReplay
from paceline._training.engine.weighted_means import MAX_SKIPPED_STEPS
from paceline._training.workers.processes.rank_environment import join_process_group
from paceline.creators._creator_arguments import (
    GivenParameters,
    HookWorker,
    ReplicaPassOrder,
    ReplicaSpec,
    call_hook,
    call_with,
    check_gpu,
)
from paceline.creators._default_functions import train_one_model, validate_one_model
from paceline.creators._pass_reports import (
    LocalMeans,
    NotedProgress,
    PassResult,
    PassSeconds,
    StepTimes,
    measured_pass,
)
from paceline.creators._pass_states import read_parts, write_part
from paceline.creators._passes import (
    DataPosition,
    Pass,
    creators_config,
    data_position_in,
    make_replica_loaders,
)
from paceline.data._order_and_random_generators import isolated_randomness, seed_everything
from paceline.data._sharded_loader import WorkerBatch
from paceline.data._torch_loaders import release_device_memory
from paceline.storage._checkpoint_errors import STATE_VERSION

logger = logging.getLogger(__name__)


def capture_pass_state(replica: "Replica") -> dict[str, Any]:
    """Return this rank's part of the state; the chief's part includes the shared state.

    Of sharded models, each rank has its pieces.
    """
    objects = replica.objects()
    part: dict[str, Any] = {"own": objects.own_state()}
    if replica.rank != 0 and not replica.is_sharded:
        return part
    shared = {
        "version": STATE_VERSION,
        "epoch": replica.position.num_begun,
        "num_steps": replica.num_steps,
        **objects.shared_state(),
        "built": replica.built,
        "seed": replica.seed,
        "place": replica.position.state(),
    }
    pieces: dict[str, Any] = {}
    shared = take_sharded_tensor_pieces(shared, "shared", pieces)
    part |= {"pieces": pieces} if pieces else {}
    return {"shared": shared, **part} if replica.rank == 0 else part


def join_pass_state(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a trainer's state, of the parts in rank order; its tensors are whole."""
    shared, ranks = parts[0]["shared"], [part["own"] for part in parts]
    if any("pieces" in part for part in parts):
        shared = joined_pieces(shared, [part.get("pieces", {}) for part in parts])
    if (sharded := shared.get("sharded_gradients")) is not None:
        # Gradients of unsharded models are the same on all ranks, so each rank gets them too.
        shared = {**shared, "sharded_gradients": None}
        ranks = [{**own, "gradients": _merged(sharded, own["gradients"])} for own in ranks]
    return {**shared, "ranks": ranks}


def _merged(first: Sequence[Any], second: Sequence[Any] | None) -> list[Any]:
    others = second or [None] * len(first)
    return [b if a is None else a for a, b in zip(first, others, strict=True)]


def split_pass_state(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a trainer's state, in rank order."""
    own, *others = whole["ranks"]
    shared = {name: value for name, value in whole.items() if name != "ranks"}
    return [{"shared": shared, "own": own}, *({"own": other} for other in others)]


def restore_pass_state(replica: "Replica", state: dict[str, Any]) -> None:
    """Put back a trainer's state; the generators last, as all else may draw from them.

    Raises:
        CheckpointMismatchError: It is of other models, optimizers or schedulers.
    """
    changes = SettingChanges(state["built"], replica.built)
    objects = replica.objects()
    objects.load_shared_state(state, changes)
    if state["seed"] != replica.seed:
        changes.note("`seed`", state["seed"], replica.seed)
    replica.num_steps = state["num_steps"]
    _go_to_position(replica, state["place"], changes)
    if replica.rank == 0:
        changes.tell()
    _load_own(replica, objects, state)


def _go_to_position(replica: "Replica", stored: dict[str, Any], changes: SettingChanges) -> None:
    if not replica.position.load_state(stored):
        _tell(replica, "The state was stored with other data or shards: its epoch begins anew.")
    for name, size in replica.position.sizes().items():
        before = stored.get(name, size)
        if before != size and None not in (before, size):
            changes.note(f"the number of {name.removeprefix('num_')} of an epoch", before, size)


def _load_own(replica: "Replica", objects: ModelsAndOptimizers, state: dict[str, Any]) -> None:
    """Restore a rank's own state; with another number of workers, all ranks take the chief's.

    Gradients are summed in each backward pass, so that they are the same on all ranks.
    """
    ranks = state["ranks"]
    is_same_size = len(ranks) == replica.world_size
    own = ranks[replica.rank if is_same_size else 0]
    objects.load_own_state(own)
    # States of generators fit the same number of workers alone.
    restore_generators(
        own["random"] if is_same_size else None,
        seed=replica.seed,
        num_steps=state["num_steps"],
        rank=replica.rank,
    )


def _tell(replica: "Replica", text: str) -> None:
    if replica.rank == 0:
        logger.warning(text)


class Replica:
    """Models of a worker, with all objects for training them.

    Args:
        spec: The objects to make.

    Raises:
        ResourcesError: A GPU is wanted, but there is none.
        TypeError: A creator returned something else than it must.
        ValueError: A creator returned too much, the scheduler needs another frequency, or the data
            that workers share differ between them.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self._worker = worker = HookWorker.from_environment(config=spec.config)
        self.rank, self.world_size = worker.rank, worker.world_size
        self.num_steps = 0
        self._rank_check = RankCheck(spec.check_ranks)
        self._is_start_compared = False
        self._replay: StepReplay | None = None
        self._alerts: list[tuple[str, str, str]] = []
        self._spec = spec
        self.seed = spec.seed
        if spec.initialization_hook is not None:
            call_hook(spec.initialization_hook, worker)
        self.device = use_own_device(worker.local_rank, gpus_per_rank=None if spec.use_gpu else 0)
        if spec.use_gpu is True:
            check_gpu(has_gpu=self.device.type == "cuda")
        seed_everything(spec.seed)
        loaders = self._make()
        # Slow creators must not count against the time that ranks wait for each other.
        self._join()
        if spec.deals_out and self._rank_check.compares_data:
            check_same_data(None, loaders)
        # Second seeding: all ranks create equal weights, then draw different numbers per rank.
        seed_everything(spec.seed, self.rank)

    def _make(self) -> dict[str, Any]:
        """Make all objects; return the loaders by name."""
        spec, device = self._spec, self.device
        config = creators_config(spec)
        loaders = make_replica_loaders(spec)
        self.position = data_position_in(loaders.train, spec, self.rank, self.world_size)
        self._validation = loaders.validation
        self.models = _created_as_list(
            spec.model_creator(config), torch.nn.Module, "model_creator", "torch.nn.Module"
        )
        for model in self.models:
            check_whole(model)
            model.to(device)
        self.optimizers = _created_as_list(
            spec.optimizer_creator(_one_or_all(self.models), config),
            torch.optim.Optimizer,
            "optimizer_creator",
            "torch.optim.Optimizer",
        )
        self.schedulers = self._make_schedulers(config)
        self.built = built_settings(self.models, self.optimizers, self.schedulers)
        self._criterion = _make_loss(spec.loss_creator, config)
        if isinstance(self._criterion, torch.nn.Module):
            self._criterion.to(device)
        self._precision = Precision.of(spec.precision)
        self.scaler = self._precision.make_scaler(device)
        return {"training": loaders.train, "validation": loaders.validation}

    def _make_schedulers(self, config: dict[str, Any]) -> list[Any]:
        spec = self._spec
        if spec.scheduler_creator is None:
            return []
        made = spec.scheduler_creator(_one_or_all(self.optimizers), config)
        schedulers = _created_as_list(made, object, "scheduler_creator", "scheduler")
        for scheduler in schedulers:
            needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            if needs_metric and spec.scheduler_step_freq != "manual":
                raise ValueError(
                    "`scheduler_step_freq` must be 'manual' with ReduceLROnPlateau, as its steps"
                    f" need a metric, but got {spec.scheduler_step_freq!r}. Hint: call"
                    " `trainer.update_scheduler(metric)` after each validation."
                )
        return schedulers

    def _join(self) -> None:
        backend = self._spec.backend
        if backend == "auto":
            shares_gpu = self._worker.local_world_size > torch.cuda.device_count()
            backend = suitable_backend(self.device, shares_gpu=shares_gpu)
        join_process_group(backend, timeout_s=self._spec.timeout_s)
        self._gradients = GradientSync(self.world_size, self.device)
        if self.is_sharded:
            # Taken before the models are divided, to build whole ones later.
            self._outlines = [outline_of(model) for model in self.models]
        for module in (*self.models, self._criterion):
            if module is not self._criterion and self.is_sharded:
                self._gradients.shard(
                    module,
                    self._spec.shard_units,
                    self.optimizers,
                    precision=self._spec.shard_precision,
                )
            elif isinstance(module, torch.nn.Module):
                self._gradients.add_model(module)
        self._gradients.watch(all_parameters(self.models, self.optimizers))
        for optimizer in self.optimizers:
            self._gradients.watch_optimizer(optimizer)

    @property
    def is_sharded(self) -> bool:
        """Whether the models are divided among the workers."""
        return self._spec.data_parallel == "fsdp" and self.world_size > 1

    def whole_models(self) -> list[torch.nn.Module] | None:
        """Return the unsharded models on the chief, else None; all ranks call this."""
        models = self.models
        if self.is_sharded:
            models = list(map(whole_model, self._outlines, models))
        return models if self.rank == 0 else None

    def objects(self) -> ModelsAndOptimizers:
        """Return the objects making up the state."""
        return ModelsAndOptimizers(
            rank=self.rank,
            models=self.models,
            optimizers=self.optimizers,
            schedulers=self.schedulers,
            scaler=self.scaler,
            parameters=all_parameters(self.models, self.optimizers),
        )

    def state_part(self, path: str | None) -> dict[str, Any] | None:
        """Return this rank's part of the state; None if the chief wrote its part to a file."""
        self._compare_ranks()
        part = capture_pass_state(self)
        return part if self.rank else write_part(part, path)

    def load_state(self, path: str | None, parts: list[Any]) -> None:
        """Put back a state; see `read_parts`."""
        restore_pass_state(self, join_pass_state(read_parts(path, parts)))

    def update_schedulers(self, metric: float) -> None:
        """Step all schedulers with a metric."""
        for scheduler in self.schedulers:
            scheduler.step(metric)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function of the user's."""
        return function()

    def _compare_ranks(self) -> None:
        compare_in_group(self._rank_check, self.models, self.optimizers)

    # ---- passes --------------------------------------------------------------------------

    def train(self, order: ReplicaPassOrder, state_path: str | None = None) -> PassResult:
        """Run the train function for a single pass.

        Args:
            order: The work to do.
            state_path: A file for the chief's part of the state, if that is wanted.

        Raises:
            TypeError: It returned something else than a dictionary.
            ValueError: There are several models and no function for them.
            RanksDifferError: Ranks differ where they must agree.
        """
        began = perf_counter()
        if not self._is_start_compared:
            self._is_start_compared = True
            self._compare_ranks()
        for model in self.models:
            model.train()
        by_epoch = self._spec.train_function is None and self._steps_by("epoch")
        batches = Pass(
            self.position,
            order.num_steps,
            self.device,
            # Alone there is nothing to weight.
            on_batch=self._begin_batch if self.world_size > 1 else None,
            on_epoch_end=self.schedulers[0].step if by_epoch else None,
        )
        times = StepTimes(self.device) if order.is_profiled else None
        given = self._given(batches, order)
        with self._noting(batches, order), measured_pass(times, "train_epoch") as measure:
            if self._spec.train_function is not None:
                with self._precision.autocast(self.device):
                    told = call_with(self._spec.train_function, given)
            else:
                told = train_one_model(
                    given,
                    batches,
                    self._precision,
                    measure,
                    steps_scheduler=self._steps_by("batch"),
                    replay=self._checked_steps(),
                    means=LocalMeans(
                        stop_on_nan=self._spec.stop_on_nan,
                        rank=self.rank,
                        max_in_a_row=1 if self.scaler is None else MAX_SKIPPED_STEPS,
                    ),
                )
        batches.finish()
        self.num_steps += batches.num_batches
        self._gradients.end_data()
        statistics = _statistics("train_function", told, batches, times, "train_epoch")
        trained = perf_counter()
        state = self.state_part(state_path) if order.wants_state else None
        ended = perf_counter()
        seconds = PassSeconds(ended - began, batches.data_wait_s, ended - trained)
        statistics = {"epoch": self.position.num_begun, **statistics}
        last_own = batches.last_own if self._spec.train_function is None else None
        alerts, self._alerts = self._alerts, []
        return PassResult(
            statistics, batches.num_samples, batches.num_batches, last_own, state, seconds, alerts
        )

    def _checked_steps(self) -> StepReplay | None:
        """Return the check of steps, if there is to be one."""
        spec, place = self._spec, f"rank {self.rank} ({self.device})"
        if spec.verify_steps is not None and self._replay is None:
            settings = spec.verify_steps, spec.on_mismatch, self._gradients, place
            tell = lambda *alert: self._alerts.append(alert)  # noqa: E731
            self._replay = StepReplay(*settings, tell, self.num_steps)
        return self._replay

    @contextmanager
    def _noting(self, batches: Pass, order: ReplicaPassOrder) -> Iterator[None]:
        """Note the progress of a pass within the block, if shown by the driver."""
        if order.progress_path is None or self.rank:
            yield
            return
        total = None
        with suppress(TypeError):
            total = len(batches)
        batches.on_batch = noted = NotedProgress(order.progress_path, total, batches.on_batch)
        try:
            yield
        finally:
            noted.close()

    def validate(self, order: ReplicaPassOrder) -> PassResult:
        """Run the validation function over the data, from their beginning.

        Raises:
            TypeError: It returned something else than a dictionary.
            ValueError: There are no data, or several models and no function for them.
        """
        function = self._spec.validation_function
        for model in self.models:
            model.eval()
        batches = Pass(
            self._validation_position(),
            order.num_steps,
            self.device,
            on_batch=self._gather_models if self.is_sharded else None,
            has_stand_ins=False,
        )
        times = StepTimes(self.device) if order.is_profiled else None
        given = self._given(batches, order)
        # Isolated randomness: each validation draws the same numbers and leaves training unchanged.
        seed = mix_seed(self.seed, self.rank)
        with (
            isolated_randomness(seed),
            # Workers may have unequally many batches.
            self._gradients.paused(),
            measured_pass(times, "validation") as measure,
        ):
            if not self._spec.deals_out:
                # Each has data of its own.
                self._gradients.gather_models(0, 0)
            if callable(function):
                with self._precision.autocast(self.device):
                    told = call_with(function, given)
            else:
                told = validate_one_model(given, batches, self._precision, measure)
        statistics = _statistics("validation_function", told, batches, times, "validation")
        last_own = None if callable(function) else batches.last_own
        return PassResult(statistics, batches.num_samples, batches.num_batches, last_own)

    def _validation_position(self) -> DataPosition:
        if self._validation is None:
            raise ValueError(
                "`data_creator` must return data to validate on as well, but returned data to train"
                " on alone."
            )
        return data_position_in(self._validation, self._spec, self.rank, self.world_size)

    def _given(self, batches: Pass, order: ReplicaPassOrder) -> GivenParameters:
        return GivenParameters(
            config=self._spec.config,
            models=_one_or_all(self.models),
            batches=batches,
            criterion=self._criterion,
            optimizers=_one_or_all(self.optimizers),
            schedulers=_one_or_all(self.schedulers) if self.schedulers else None,
            info={
                "epoch_idx": self.position.epoch,
                "num_steps": order.num_steps,
                "global_step": self.num_steps,
                **order.info,
            },
            scaler=self.scaler,
            device=self.device,
        )

    def _begin_batch(self, batch: WorkerBatch) -> None:
        num_all = batch.num_all * self.position.num_copies
        self._gradients.begin_batch(batch.num_own, num_all, is_last=False)

    def _gather_models(self, batch: WorkerBatch) -> None:
        self._gradients.gather_models(batch.num_shards, self._spec.num_shards)

    def _steps_by(self, frequency: str) -> bool:
        return bool(self.schedulers) and self._spec.scheduler_step_freq == frequency


def _statistics(
    argument: str, told: Any, batches: Pass, times: StepTimes | None, whole: str
) -> dict[str, Any]:
    """Return the metrics returned by a function for a pass, with counts."""
    if told is not None and not isinstance(told, dict):
        raise TypeError(
            f"`{argument}` must return a dictionary of metrics, but returned a"
            f" {type(told).__name__}."
        )
    statistics: dict[str, Any] = {
        "batch_count": batches.num_batches,
        "num_samples": batches.num_samples,
        **_plain_metrics(told or {}),
    }
    if times is not None:
        statistics["profile"] = times.means(whole, max(batches.num_batches, 1))
    return statistics


def _plain_metrics(value: Any) -> Any:
    """Return metrics with 0-d tensors replaced by numbers."""
    if isinstance(value, dict):
        return {name: _plain_metrics(item) for name, item in value.items()}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    return value


def _make_loss(creator: Callable[..., Any] | None, config: dict[str, Any]) -> Any:
    if creator is None:
        return None
    is_class = isinstance(creator, type) and issubclass(creator, torch.nn.modules.loss._Loss)
    # Loss classes of torch take no config.
    return creator() if is_class else creator(config)


def _created_as_list(made: Any, kind: type, creator: str, name: str) -> list[Any]:
    """Return the results of a creator as a list, after type checks."""
    is_several = isinstance(made, (list, tuple))
    values = list(made) if is_several else [made]
    wrong = next((value for value in values if value is None or not isinstance(value, kind)), None)
    if wrong is not None or not values or None in values:
        got = "nothing" if not values else type(wrong).__name__
        raise TypeError(f"`{creator}` must return a {name} or several, but returned {got}.")
    return values


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


_replica: list[Replica] = []


def make_replica(spec: ReplicaSpec) -> None:
    """Make this worker's replica."""
    # An earlier one must not take the place of the new one's state.
    _replica.clear()
    release_device_memory()
    _replica.append(Replica(spec))


def execute(method: str, *args: Any) -> Any:
    """Call a method of this worker's replica."""
    return getattr(_replica[0], method)(*args)
