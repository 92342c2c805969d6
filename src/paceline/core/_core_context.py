"""The context of one training process, from `core.init()` to its end."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from paceline.core._alerts import alert_of, log_alert
from paceline.core._attempt_journal import describe_error, end_journal, outcome_of
from paceline.core._checkpoint_context import CheckpointContext
from paceline.core._cluster_info import ClusterInfo
from paceline.core._distributed_context import DistributedContext
from paceline.core._enums import Outcome
from paceline.core._errors import InvalidHP
from paceline.core._notices_to_parent import tell_invalid_hp
from paceline.core._preempt_context import PreemptContext
from paceline.core._profiler_context import ProfilerContext
from paceline.core._searcher_context import SearcherContext
from paceline.core._send_to_trackers import TrackingGroup
from paceline.core._tensorboard_files import TensorboardFiles
from paceline.core._time_account import ScriptTimes
from paceline.core._train_context import TrainContext
from paceline.journal import JournalWriter

_open_contexts: WeakSet["Context"] = WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParts:
    """Parts of a `Context`."""

    train: TrainContext
    checkpoint: CheckpointContext
    preempt: PreemptContext
    searcher: SearcherContext
    distributed: DistributedContext
    profiler: ProfilerContext
    info: ClusterInfo | None
    run_dir: Path
    seed: int
    journal: JournalWriter
    tensorboard: TensorboardFiles
    times: ScriptTimes
    tracking: TrackingGroup
    lock: ExitStack


class Context:
    """Everything that a training script may use; made by `core.init()`.

    Use it as a context manager, so that the way in which the script ends is recorded.
    """

    def __init__(self, parts: ContextParts) -> None:
        self._parts = parts
        self.train = parts.train
        self.checkpoint = parts.checkpoint
        self.preempt = parts.preempt
        self.searcher = parts.searcher
        self.distributed = parts.distributed
        self.profiler = parts.profiler
        self._is_closed = False
        _open_contexts.add(self)

    @property
    def info(self) -> ClusterInfo | None:
        """What `get_cluster_info()` returns: None without a cluster."""
        return self._parts.info

    @property
    def run_dir(self) -> Path:
        """The run directory that this process writes its journal to."""
        return self._parts.run_dir

    @property
    def seed(self) -> int:
        """The seed of the trial or run, the same in all its attempts; use it as you like."""
        return self._parts.seed

    @property
    def latest_checkpoint(self) -> str | None:
        """The UUID of the checkpoint to restore, on a cluster as well as off, or None.

        On the chief it follows the checkpoints that are stored.
        """
        return self.checkpoint.latest

    def alert(self, title: str = "", description: str = "", level: str = "info") -> None:
        """Tell people something that they should see; any rank may call, from any thread.

        A master shows it in the trial's log and as an event. Without one it is logged, and
        `paceline runs show` lists it.

        Args:
            title: A few words, 200 characters at most.
            description: More about it, 4,000 characters at most.
            level: "debug", "info", "warn" or "error".

        Raises:
            TypeError: A text is no string.
            ValueError: `level` is unknown, or there is no text, or a text is too long.
        """
        record = alert_of(title, description, level)
        self._parts.journal.append(record)
        if self.info is None or not self.info.cluster_id:
            log_alert(record, self.distributed.rank)

    def close(self) -> None:
        """End normally; does nothing if the context is closed already."""
        self._finish(None)

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        outcome = self._finish(error)
        if outcome is Outcome.INVALID_HP:
            # The search has its answer: for the launcher and the runner this is no failure.
            request = SystemExit(0)
            request.is_success = True  # type: ignore[attr-defined] # for `pytorch.launch`
            raise request from error

    def _finish(self, error: BaseException | None) -> Outcome | None:
        if self._is_closed:
            return None
        self._is_closed = True
        _open_contexts.discard(self)
        outcome = self._outcome(error)
        parts = self._parts
        try:
            parts.preempt.close()
            if error is not None and outcome in (Outcome.ERROR, Outcome.INVALID_HP):
                parts.distributed.fail(error)
            parts.distributed.close()
        finally:
            parts.profiler.off()
            parts.tensorboard.close()
            self.checkpoint.storage.watch(None)
            if outcome is not Outcome.ERROR:
                parts.times.end()
            end_journal(parts.journal, outcome, error)
            parts.tracking.finish(outcome, None if error is None else describe_error(error))
            parts.lock.close()
        if isinstance(error, InvalidHP):
            # Last, as all workers are ended for it.
            tell_invalid_hp(parts.journal, error)
        return outcome

    def _outcome(self, error: BaseException | None) -> Outcome:
        outcome = outcome_of(error)
        is_preempted = outcome is Outcome.COMPLETED and self.preempt.is_acknowledged
        return Outcome.PREEMPTED if is_preempted else outcome


def has_context() -> bool:
    """Tell whether this process has begun by `core.init()` and not ended yet."""
    return bool(_open_contexts)
