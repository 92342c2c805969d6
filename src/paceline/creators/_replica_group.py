"""The workers of a trainer: formed, formed again, and called."""

from paceline.creators import _replica_functions
from paceline.creators._replica_spec import ReplicaSpec, check_gpu
from paceline.engine import join_pass_state, split_pass_state
from paceline.gpus import num_visible_gpus
from paceline.workers import (
    ElasticLimits,
    RecoveringGroup,
    StateFunctions,
    WorkerPool,
    WorkerSettings,
)

# An optimizer loads the latter, which would take each worker more than a second.
_PRELOAD = ("paceline.creators._replica_functions", "torch._dynamo")
_STATE = StateFunctions(
    _replica_functions.state, _replica_functions.load_state, join_pass_state, split_pass_state
)


class ReplicaGroup(RecoveringGroup):
    """The workers of a trainer, each with its replica; they stay until `stop`.

    At first there must be as many as were asked for. When some were lost, it goes on with what can
    be started.

    Args:
        settings: How they are started.
        spec: What each of them makes.

    Raises:
        ResourcesError: The workers want more than there is.
    """

    def __init__(self, settings: WorkerSettings, spec: ReplicaSpec) -> None:
        limits = ElasticLimits.of(settings.num_workers)
        hint = "free resources, or a smaller `num_workers`."
        super().__init__(limits, hint=hint, functions=_STATE)
        self._settings = settings
        self._spec = spec
        if self.is_local:
            settings.resources.check_cores(settings.num_workers, "num_cpus_per_worker")
            if spec.use_gpu is True:
                check_gpu(has_gpu=num_visible_gpus() > 0)
        # A Ray cluster refuses here what it can never run.
        self._made_pool = self._make_pool()

    @property
    def num_workers(self) -> int:
        """How many workers there are, or were at last."""
        return self._num_last or self._settings.num_workers

    @property
    def is_local(self) -> bool:
        """Whether all workers are processes of this machine."""
        return self._settings.cluster == "local"

    def _set_up(self) -> None:
        self._call(_replica_functions.set_up, self._spec)
        # What was asked for could run, so fewer are a loss that may pass.
        self._elastic.limits = ElasticLimits(least=1, most=self._spec.num_shards)

    def _make_pool(self) -> WorkerPool:
        return self._settings.make_pool(
            self._settings.num_workers,
            timeout_s=self._spec.timeout_s,
            preload=_PRELOAD,
            strategy="SPREAD",
        )
