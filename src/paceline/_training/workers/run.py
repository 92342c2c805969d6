"""Run of a call by workers over their generations: restarts after losses, growth.

Launch of a call or program in workers, to its end: signals, losses and growth.
"""

import logging
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from paceline._base.process_and_network import take
from paceline._base.run_memory import run_memory
from paceline._training.workers import worker_failures as failures
from paceline._training.workers.launch_nodes import LaunchNodes
from paceline._training.workers.launch_nodes_server import (
    NodeFailureCause,
    NodeMessage,
    NodeMessageKind,
)
from paceline._training.workers.pickled_calls import pack_call
from paceline._training.workers.process_pools import LocalPool, ProcessPool
from paceline._training.workers.processes.process_facts_and_signals import noted_signals
from paceline._training.workers.shared_memory import SharedBuffers
from paceline._training.workers.worker_pools import PendingCall
from paceline._training.workers.worker_settings import check_crowd
from paceline._training.workers.workers import ElasticLimits, Workers

logger = logging.getLogger(__name__)


# How often to look whether the call has ended, in seconds, and while there are too few workers.
_INTERVAL_S = 0.01
_FORM_INTERVAL_S = 0.25
_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_ENDING = (signal.SIGTERM, signal.SIGINT)
# Time for the workers to leave after a second Ctrl-C, in seconds.
_LEAVE_S = 5.0
_END_INTERVAL_S = 0.01
# How often other nodes learn the progress of this node's ranks.
_PROGRESS_S = 2.0
LAUNCH_HINT = "free resources, or ask for fewer workers."
# Numbers are signals that arrived; None is the end of the call. Messages come from other nodes.
_Events = SimpleQueue[int | NodeMessage | None]
# How often capacity is looked at while the workers run. A signal that arrives just before this
# process waits is seen then at the latest.
_LAUNCH_INTERVAL_S = 0.2


class Run(ABC):
    """Call carried out by workers: repeated after losses, continued by others from a checkpoint.

    `begin` it. Then `wait`, and by its answer `take_end` or `go_on`, until `take_end` returns
    values. Subclasses define the call of the workers and the steps between two generations.

    Args:
        workers: The workers.
    """

    # Errors that end a generation and may be followed by another one; others end the run.
    _retried: tuple[type[Exception], ...] = (failures.WorkerFailedError,)

    def __init__(self, workers: Workers[Any]) -> None:
        self._workers = workers
        self._call: PendingCall | None = None
        self._call_lock = threading.Lock()
        self._has_ended = threading.Event()
        self._form_at: float | None = None
        # At the last look for more workers, or when the generation began.
        self._num_commits_seen = 0
        self._is_growing = False
        # Causes of the failed starts since the last start that was recorded.
        self._restart_causes: list[str] = []

    @property
    @abstractmethod
    def num_commits(self) -> int:
        """How many checkpoints were committed, since the first start."""

    @abstractmethod
    def _submit(self) -> PendingCall:
        """Begin the call on the present workers."""

    @abstractmethod
    def _decide(self, error: Exception) -> None:
        """Return if the workers start again after a failure; all of them have ended.

        Raises:
            Exception: They do not.
        """

    @abstractmethod
    def _has_recorded(self) -> bool:
        """Tell whether the workers of the present generation have begun to record."""

    def _prepare_next(self) -> None:  # noqa: B027 - some have nothing to do here
        """Have the next workers begin where the last checkpoint was committed."""

    def _note_restart(self, error: Exception) -> None:  # noqa: B027 - likewise
        """Report a restart of the workers after a failure."""

    def _values_of(self, call: PendingCall) -> list[Any]:
        """Return the values of an ended call.

        Raises:
            Exception: It has failed.
        """
        return call.wait() or []

    def _is_complete(self) -> bool:
        """Tell whether nothing is left to do, though the workers were ended to have others."""
        return False

    def _ask_to_move(self) -> None:  # noqa: B027 - some cannot be asked
        """Ask the workers for a checkpoint soon, as others are ready to resume from there."""

    def _wake(self, call: PendingCall) -> None:  # noqa: B027 - most look by themselves
        """Handle the end of the present call; runs in another thread."""

    # ---- the generations -----------------------------------------------------------------

    def begin(self) -> None:
        """Form the workers if necessary and begin the call, or schedule a later attempt.

        Raises:
            Exception: The workers cannot be formed.
        """
        self._has_ended.clear()
        self._is_growing = False
        while True:
            try:
                delay_s = 0.0 if self._workers.is_alive else self._workers.try_form()
                self._form_at = time.monotonic() + delay_s if delay_s else None
                if not delay_s:
                    self._begin_call()
                return
            except (failures.WorkerFailedError, failures.WorkerStartError) as error:
                if not self._workers.pool.can_restart:
                    raise
                self._take_failure(error)

    def _begin_call(self) -> None:
        self._num_commits_seen = self.num_commits
        self._call = self._submit()
        self._call.add_done_callback(self._note_end)

    def _note_end(self, call: PendingCall) -> None:
        # Calls end here too if their workers were replaced by others.
        with self._call_lock:
            is_present = call is self._call
            if is_present:
                self._has_ended.set()
        if is_present:
            self._wake(call)

    def wait(self) -> bool:
        """Wait a moment for the end of the call; return whether the call has ended."""
        if self._form_at is None:
            return self._has_ended.wait(_INTERVAL_S)
        left_s = max(0.0, self._form_at - time.monotonic())
        return self._has_ended.wait(min(_FORM_INTERVAL_S, left_s))

    def go_on(self) -> None:
        """Do any work due during the call: form workers, or replace them."""
        if self._form_at is not None:
            if time.monotonic() >= self._form_at:
                self.begin()
        elif not self._is_growing and self.num_commits > self._num_commits_seen:
            self._num_commits_seen = self.num_commits
            self._resize_if_due()
        elif self._workers.prepare_growth():
            self._ask_to_move()

    def _resize_if_due(self) -> None:
        """Form more workers, or leave nodes, from the checkpoint just committed."""
        present, wanted = self._workers.num_present, self._workers.next_size()
        if wanted is None or self._has_ended.is_set():
            return
        logger.info(
            "%d workers can run: ending the present %d after a checkpoint, to go on from it.",
            wanted,
            present,
        )
        self._begin_others()

    def _begin_others(self) -> None:
        """End the workers, as others resume from the last checkpoint."""
        self._is_growing = True
        self._workers.end_generation()
        with self._call_lock:
            self._call = None
        self._begin_next()

    def take_end(self) -> list[Any] | None:
        """Return the values of the ended call, or None if other workers repeat the call.

        Raises:
            Exception: What ended the call, if the workers do not start again.
        """
        assert self._call is not None
        if not self._is_growing or self._is_complete():
            try:
                return self._values_of(self._call)
            except self._retried as error:
                if not self._workers.pool.can_restart:
                    raise
                self._take_failure(error)
                self.begin()
                return None
        self._begin_next()
        return None

    def _begin_next(self) -> None:
        self._restart_causes.clear()
        self._prepare_next()
        self.begin()

    def _take_failure(self, error: Exception) -> None:
        """Prepare the generation after a failure.

        Raises:
            Exception: There is none.
        """
        # Until the others have ended they may commit and delete checkpoints.
        self._workers.await_end()
        self._decide(error)
        if self._has_recorded():
            self._restart_causes.clear()
        self._restart_causes.append(failures.restart_cause(error))
        self._prepare_next()
        self._note_restart(error)


class LaunchRun(Run):
    """Run of a call by workers of its own: repeated after failures, continued with more workers.

    Signals whose action is the default one are forwarded to the workers meanwhile, if this is the
    main thread. The first SIGINT lets the workers store their work, the second one asks them to
    leave now and kills those that do not; so does a second SIGTERM at once.

    Args:
        workers: The workers, which are formed here and ended at the end.
        policy: Whether they start again after a failure.
        nodes: The launchers of the other nodes, with which this one agrees; None if there are none.

    Attributes:
        received: The signals that have arrived.
    """

    _workers: Workers[ProcessPool]
    _retried = (Exception,)

    def __init__(
        self,
        workers: Workers[Any],
        policy: failures.RestartPolicy,
        nodes: LaunchNodes | None = None,
    ) -> None:
        super().__init__(workers)
        self.received: set[int] = set()
        self._policy = policy
        self._nodes = nodes
        self._verdict: NodeMessage | None = None
        self._decision: failures.RestartDecision | None = None
        self._num_commits_before = 0
        self._make_call: Callable[[], PendingCall] | None = None
        self._never_begins = False
        self._tell_progress_at = 0.0
        # The ranks of this node that had returned when they were asked to end.
        self._returned: list[int] | None = None
        self._events: _Events = SimpleQueue()
        # Counts by node, with None for this one: all nodes may receive the same signal.
        self._counts: Counter[tuple[int | None, int]] = Counter()

    def run(self, begin: Callable[[], PendingCall]) -> list[Any]:
        """Carry out the call and return its values, in rank order.

        Args:
            begin: Begins the call in workers that were just started.

        Raises:
            Exception: As `PendingCall.wait` and `Workers.form`.
        """
        self._make_call = begin
        # A `SimpleQueue` may be put into from a signal handler.
        with noted_signals(_FORWARDED, self._events.put):
            try:
                if self._nodes is not None:
                    self._nodes.open(self._events.put)
                values = self._run()
            except BaseException as error:
                self._workers.stop(force=True)
                self._close_nodes(error)
                raise
            self._workers.stop()
            self._close_nodes(None)
            return values

    def _run(self) -> list[Any]:
        self.begin()
        while not self._never_begins:
            if not self.wait():
                self.go_on()
            elif (values := self.take_end()) is not None:
                return values
        return []

    # ---- the generations -----------------------------------------------------------------

    @property
    def num_commits(self) -> int:
        """How many checkpoints were committed, since the first start."""
        return self._num_commits_before + self._workers.pool.run_events.num_checkpoints

    def begin(self) -> None:
        """Form the workers and begin the call, once other nodes begin as well."""
        self._never_begins = self._nodes is not None and not self._await_start(self._nodes)
        if not self._never_begins:
            self._has_ended.clear()
            self._is_growing = False
            self._workers.form()
            self._begin_call()

    def _submit(self) -> PendingCall:
        assert self._make_call is not None
        return self._make_call()

    def wait(self) -> bool:
        """Handle a signal or message, if any comes; return whether the workers have ended."""
        call = self._call
        assert call is not None
        if call.is_done and not self._workers.pool.is_ending:
            return True
        self._tell_progress()
        try:
            event = self._events.get(
                timeout=_END_INTERVAL_S if call.is_done else _LAUNCH_INTERVAL_S
            )
        except Empty:
            event = None
        except KeyboardInterrupt:
            # A handler that someone else had set.
            event = signal.SIGINT
        if event is not None:
            self._take_event(event)
        return False

    def _wake(self, call: PendingCall) -> None:
        self._events.put(None)
        failure = self._workers.pool.refusal or _launch_failure(call)
        if self._nodes is not None and failure is not None:
            self._nodes.tell_failed(failure)

    def take_end(self) -> list[Any] | None:
        """Return the values of the call, or None if the workers start again."""
        self._workers.await_end()
        return super().take_end()

    def _begin_others(self) -> None:
        """Ask the workers to store their work and end, as others resume from there."""
        self._is_growing = True
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        pool = self._workers.pool
        pool.request_stop(pool.grace_s)

    def _is_complete(self) -> bool:
        return bool(self.received) or self._workers.pool.run_events.are_completed

    def _values_of(self, call: PendingCall) -> list[Any]:
        failure = _launch_failure(call)
        if self._nodes is not None:
            failure, self._decision = self._agree(self._nodes)
        if failure is not None:
            raise failure
        return _values_of(call)

    def _decide(self, error: Exception) -> None:
        decision = self._decision
        if decision is None:
            decision = self._policy.decide(error, self.num_commits, self.received)
        if not decision.is_restart:
            if decision.text:
                logger.error("%s", decision.text)
            raise error
        text = failures.describe_failure(error)
        logger.warning("%s Starting the workers again, %s.", text, decision.text)

    def _has_recorded(self) -> bool:
        return self._workers.pool.run_events.have_begun

    def _prepare_next(self) -> None:
        self._num_commits_before = self.num_commits
        pool = self._workers.pool
        pool.tell_restarts(self._restart_causes)
        if self._nodes is None:
            pool.resume_from(pool.run_events.resume_variables())

    # ---- signals -------------------------------------------------------------------------

    def _take_event(self, event: int | NodeMessage) -> None:
        if isinstance(event, int):
            if self._nodes is not None and event in _ENDING:
                self._note_returned()
                self._nodes.relay(event)
            self._forward(event, None)
        elif event.word == NodeMessageKind.SIGNAL:
            self._note_returned()
            self._forward(event.signum, event.node_rank)
        elif event.word == NodeMessageKind.HANG and event.failure is not None:
            self._workers.pool.end_hung(event.failure.error())
        else:
            # The workers of another node have failed, or all is over.
            self._note_returned()
            if event.word != NodeMessageKind.END:
                self._verdict = event
            self._ask_to_end()

    def _forward(self, signum: int, node_rank: int | None) -> None:
        pool = self._workers.pool
        self.received.add(signum)
        before = max((n for (_, number), n in self._counts.items() if number == signum), default=0)
        self._counts[node_rank, signum] += 1
        count = self._counts[node_rank, signum]
        if signum in _ENDING and count <= before:
            # Another node was sent the same signal, as by Slurm.
            return
        if signum not in _ENDING or count == 1:
            pool.signal(signum)
        elif signum == signal.SIGINT and count == 2:
            logger.warning("SIGINT again: the workers leave now.")
            # Before the signal: the first worker to leave must not have the others ended.
            pool.request_stop(_LEAVE_S, is_asked=True)
            pool.signal(signum)
        else:
            logger.warning("%s again: the workers are killed.", failures.signal_name(signum))
            pool.request_stop(0.0)

    # ---- several nodes -------------------------------------------------------------------

    def _tell_progress(self) -> None:
        if self._nodes is not None and time.monotonic() >= self._tell_progress_at:
            self._tell_progress_at = time.monotonic() + _PROGRESS_S
            self._nodes.tell_progress(self._workers.pool.observations())

    def _note_returned(self) -> None:
        if self._returned is None:
            ranks = self._workers.pool.observations()
            self._returned = [watched.rank for watched in ranks if watched.has_returned]

    def _await_start(self, nodes: LaunchNodes) -> bool:
        """Wait until the workers of all nodes are to start; return whether they ever will.

        Raises:
            Exception: They never will, after a failure.
        """
        while True:
            event = self._verdict or take(self._events)
            self._verdict = None
            if isinstance(event, NodeMessage) and event.word == NodeMessageKind.START:
                nodes.port = event.port
                self._returned = None
                self._workers.pool.resume_from(event.resume)
                return True
            if isinstance(event, NodeMessage) and event.word in (
                NodeMessageKind.VERDICT,
                NodeMessageKind.LOST,
            ):
                # A launcher that has come back can hear what becomes of those before.
                failure, decision = _read_verdict_on_launch(event)
                if failure is None:
                    return False
                if not decision.is_restart:
                    raise failure
            elif isinstance(event, NodeMessage) and event.word == NodeMessageKind.REFUSED:
                raise failures.NodesDifferError(event.text)
            elif event is not None:
                self._take_event(event)
            self._check_signals()

    def _check_signals(self) -> None:
        """Raise if this launcher is asked to end while no workers run."""
        if signal.SIGINT in self.received:
            raise KeyboardInterrupt
        if signal.SIGTERM in self.received:
            text = "This launcher received SIGTERM while it waited for those of other nodes."
            raise failures.WorkerFailedError(text, 0, signal=signal.SIGTERM)

    def _agree(self, nodes: LaunchNodes) -> tuple[BaseException | None, failures.RestartDecision]:
        """Wait for the end of workers on all nodes; return their failure and the decision.

        Raises:
            Exception: Node 0 is not there any more.
        """
        events = self._workers.pool.run_events
        self._note_returned()
        own = [signum for node_rank, signum in self._counts if node_rank is None]
        nodes.tell_ended(
            events.num_checkpoints, own, events.resume_variables(), self._returned or ()
        )
        while self._verdict is None:
            event = take(self._events)
            if event is not None:
                self._take_event(event)
        verdict, self._verdict = self._verdict, None
        failure, decision = _read_verdict_on_launch(verdict)
        if decision.is_restart:
            # Other nodes that had signals are lost.
            self._counts = Counter({each: n for each, n in self._counts.items() if each[0] is None})
            self.received = {signum for _, signum in self._counts}
        return failure, decision

    def _close_nodes(self, error: BaseException | None) -> None:
        if self._nodes is not None:
            self._nodes.close(error)


def _read_verdict_on_launch(
    verdict: NodeMessage,
) -> tuple[Exception | None, failures.RestartDecision]:
    """Return the failure in a message of node 0, or None, and the restart decision."""
    decision = failures.RestartDecision(verdict.is_restart, verdict.text)
    if verdict.failure is None:
        return None, decision
    if verdict.failure.cause == NodeFailureCause.REFUSED:
        logger.warning("%s The run ends for all ranks.", verdict.failure.text)
        return None, decision
    return verdict.failure.error(), decision


def _launch_failure(call: PendingCall) -> BaseException | None:
    """Return the error of an ended call, or None after success."""
    if call.error is not None:
        # Error may be a rank's KeyboardInterrupt: returned, as no Ctrl-C reached this process.
        return call.error
    try:
        call.wait()
    except Exception as error:
        return error
    return None


def _values_of(call: PendingCall) -> list[Any]:
    return [] if _launch_failure(call) is not None else call.wait() or []


_FOR_EVER_S = 1e9


def call_in_workers(
    function: Callable[..., Any],
    num_workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    grace_s: float = 10.0,
    max_restarts: int = 0,
    heartbeat_timeout_s: float | None = 30.0,
    collective_timeout_s: float = 1800.0,
) -> list[Any]:
    """Call a function in new worker processes, and return its values in rank order.

    The workers see the driver's environment, working directory and module path. Their output
    goes to the driver's `sys.stdout` and `sys.stderr`, with the rank before each line if there are
    several.

    Args:
        function: The function to call, in every worker alike.
        num_workers: The number of workers.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        grace_s: The time in seconds that the other workers get when one fails.
        max_restarts: How often the workers are started again after a failure, see
            `RestartPolicy`. A run of the function then resumes from its last checkpoint.
        heartbeat_timeout_s: How long a worker may be stopped or hold Python's lock, in seconds;
            None for ever.
        collective_timeout_s: How long ranks may wait for others in a collective operation, in
            seconds.

    Raises:
        NotSendableError: The function, an argument or a value that it returned cannot be pickled.
        ResourcesError: There are far more workers than cores of this machine.
        CollectiveMismatchError: Ranks wait in a collective operation that others do not join.
        WorkerFailedError: A worker was ended by a signal, hung or left by `sys.exit()`.
        WorkerStartError: A worker cannot be started.
        Exception: The function's error on the rank that failed first, with the traceback of
            that rank as its cause.
    """

    check_crowd(num_workers)

    def make_pool() -> LocalPool:
        return LocalPool(
            num_workers,
            environment=variables,
            grace_s=grace_s,
            heartbeat_timeout_s=heartbeat_timeout_s or _FOR_EVER_S,
            collective_timeout_s=collective_timeout_s,
        )

    workers = Workers(ElasticLimits.of(num_workers), make_pool, hint=LAUNCH_HINT)
    policy = failures.RestartPolicy(max_restarts, option="max_restarts", retries_errors=True)
    runner = LaunchRun(workers, policy)
    packed = pack_call(function, args, kwargs, SharedBuffers())
    try:
        with run_memory(is_wanted=max_restarts > 0) as variables:
            return runner.run(lambda: workers.pool.submit_packed(packed))
    except Exception as error:
        signum = getattr(error, "signal", None)
        if signum in runner.received and signum != signal.SIGINT:
            # The driver was asked to end, and its workers did not take that as their own affair.
            signal.raise_signal(signum)
        if signal.SIGINT in runner.received:
            raise KeyboardInterrupt from error
        raise
