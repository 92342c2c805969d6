"""Run one call of a worker group to its end, with its signals, losses and growth."""

import logging
import os
import signal
from collections import Counter
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from paceline.workers._elastic_group import ElasticGroup
from paceline.workers._policy import ElasticLimits, RestartPolicy, describe_failure
from paceline.workers.pools._pool import PendingCall
from paceline.workers.pools._served_pool import ServedPool
from paceline.workers.processes._signals import noted_signals
from paceline.workers.processes._spec import signal_name

logger = logging.getLogger(__name__)

_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_ENDING = (signal.SIGTERM, signal.SIGINT)
# What the workers get to leave in after a second Ctrl-C, in seconds.
_LEAVE_S = 5.0
# How often capacity is looked at while the workers run. A signal that arrives just before this
# process waits is seen then at the latest.
_INTERVAL_S = 0.2
_END_INTERVAL_S = 0.01
_MASTERS_VARIABLE = "PACELINE_RUN_DIR"

# Numbers are signals that arrived; None is the end of the call.
_Events = SimpleQueue[int | None]


class LaunchGroup(ElasticGroup):
    """Workers that are started for one call, on which runs go on from the last checkpoint.

    Args:
        limits: How many workers there may be.
        make_pool: Makes their pool.
    """

    def __init__(self, limits: ElasticLimits, make_pool: Callable[[], ServedPool]) -> None:
        super().__init__(limits, hint="free resources, or ask for fewer workers.")
        self._make = make_pool
        self._num_commits_before = 0

    @property
    def pool(self) -> ServedPool:
        """The pool of the workers."""
        assert isinstance(self._pool, ServedPool)
        return self._pool

    @property
    def num_commits(self) -> int:
        """How many checkpoints the workers have committed, since the first start."""
        return self._num_commits_before + self.pool.reports.num_checkpoints

    def ask_to_end(self) -> None:
        """Ask the workers to store their work and end, within the grace of the pool."""
        self.pool.request_stop(self.pool.grace_s)

    def prepare_next(self) -> None:
        """Have the next workers go on where the present ones, which have ended, have stopped."""
        self._num_commits_before = self.num_commits
        self.pool.resume_from_reports()
        self._elastic.end()

    def _make_pool(self) -> ServedPool:
        return self._make()


class GroupRunner:
    """Has the workers of a group carry out one call, again after failures and with more workers.

    Signals whose action is the default one are forwarded to the workers meanwhile, if this is the
    main thread. The first SIGINT lets the workers store their work, the second one asks them to
    leave now and kills those that do not; so does a second SIGTERM at once.

    Args:
        group: The workers, which are formed here and ended at the end.
        policy: Whether they start again after a failure.

    Attributes:
        received: The signals that have arrived.
    """

    def __init__(self, group: LaunchGroup, policy: RestartPolicy) -> None:
        self.received: set[int] = set()
        self._group = group
        self._policy = policy
        self._events: _Events = SimpleQueue()
        self._counts: Counter[int] = Counter()

    def run(self, begin: Callable[[], PendingCall]) -> list[Any]:
        """Carry out the call and return its values, in rank order.

        Args:
            begin: Begins the call in workers that were just started.

        Raises:
            Exception: As `PendingCall.wait` and `ElasticGroup.form`.
        """
        # A `SimpleQueue` may be put into from a signal handler.
        with noted_signals(_FORWARDED, self._events.put):
            try:
                values = self._run(begin)
            except BaseException:
                self._group.stop(force=True)
                raise
            self._group.stop()
            return values

    def _run(self, begin: Callable[[], PendingCall]) -> list[Any]:
        while True:
            self._group.form()
            call = begin()
            is_growing = self._follow(call)
            self._group.await_end()
            if is_growing and not self.received and not self._group.pool.reports.are_completed:
                logger.info("More workers can run: starting again with more of them.")
            else:
                try:
                    return call.wait() or []
                except Exception as error:
                    self._note_failure(error)
            self._group.prepare_next()

    def _note_failure(self, error: Exception) -> None:
        """Log a failure; raise its error if the workers do not start again."""
        decision = self._policy.decide(error, self._group.num_commits, self.received)
        if decision.is_restart:
            text = describe_failure(error)
            logger.warning("%s Starting the workers again, %s.", text, decision.text)
            return
        if decision.text:
            logger.error("%s", decision.text)
        raise error

    def _follow(self, call: PendingCall) -> bool:
        """Forward signals until the call has ended; tell whether that was to grow."""
        call.add_done_callback(lambda _: self._events.put(None))
        num_commits = self._group.num_commits
        is_growing = False
        while not call.is_done or self._group.pool.is_ending:
            try:
                event = self._events.get(timeout=_END_INTERVAL_S if call.is_done else _INTERVAL_S)
            except Empty:
                event = None
            except KeyboardInterrupt:
                # A handler that someone else had set.
                event = signal.SIGINT
            if event is not None:
                self._forward(event)
            elif not is_growing and self._group.num_commits > num_commits:
                num_commits = self._group.num_commits
                is_growing = self._group.next_size() is not None
                if is_growing:
                    self._group.ask_to_end()
        return is_growing

    def _forward(self, signum: int) -> None:
        pool = self._group.pool
        self.received.add(signum)
        self._counts[signum] += 1
        if signum not in _ENDING or self._counts[signum] == 1:
            pool.signal(signum)
        elif signum == signal.SIGINT and self._counts[signum] == 2:
            logger.warning("SIGINT again: the workers leave now.")
            # Before the signal: the first worker to leave must not have the others ended.
            pool.request_stop(_LEAVE_S, is_asked=True)
            pool.signal(signum)
        else:
            logger.warning("%s again: the workers are killed.", signal_name(signum))
            pool.request_stop(0.0)


def offered_restarts(max_restarts: int) -> int:
    """Return how many restarts there are here: none under a master, whose own they are."""
    if max_restarts and os.environ.get(_MASTERS_VARIABLE):
        logger.warning(
            "%d restart(s) were asked for, but under a master its own count: `max_restarts` of the"
            " experiment's configuration.",
            max_restarts,
        )
        return 0
    return max_restarts
