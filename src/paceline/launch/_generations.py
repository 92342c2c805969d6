"""Run the workers of this node, again after losses, in changing number where that is allowed."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from paceline.launch._arguments import LaunchOptions
from paceline.launch._command import WorkerCommand
from paceline.launch._supervise import WorkersEnd, run_workers
from paceline.workers import (
    SHARDS_VARIABLE,
    Elastic,
    ElasticLimits,
    GiveUp,
    LocalGroup,
    Placement,
    Restarts,
    Start,
    Wait,
    WorkerExit,
    WorkerStartError,
    describe_failure,
    first_failure,
    offered_restarts,
)

logger = logging.getLogger("paceline.launch")

_INTERRUPTED = 130
_LOOK_INTERVAL_S = 0.5


class Generations:
    """The workers of one command line, from the first start to the last end.

    Args:
        command: What each worker runs.
        options: The launcher's options.
        limits: How many workers there may be.
        place: Returns where so many workers meet; called for each start.
        capacity: Returns how many could run at this moment.
    """

    def __init__(
        self,
        command: WorkerCommand,
        options: LaunchOptions,
        limits: ElasticLimits,
        place: Callable[[int], Placement],
        capacity: Callable[[], int],
    ) -> None:
        self._command = command
        self._options = options
        self._place = place
        self._capacity = capacity
        self._elastic = Elastic(limits)
        self._restarts = Restarts(offered_restarts(options.max_restarts))
        self._variables: dict[str, str] = {}
        self._is_elastic = limits.least < limits.most
        if self._is_elastic:
            # The global batch is the same for any number of workers within the bounds.
            self._variables[SHARDS_VARIABLE] = os.environ.get(SHARDS_VARIABLE, f"{limits.most:g}")

    def run(self) -> int:
        """Run to the end and return the exit code.

        Raises:
            WorkerStartError: A worker cannot be started, or there were too few for too long.
        """
        while True:
            num_workers = self._await_workers()
            start = Start(is_python=self._command.is_python)
            is_growing = threading.Event()
            watch = partial(self._growing, start=start, is_growing=is_growing)
            placement = self._place(num_workers)
            end = run_workers(self._command, placement, self._options, self._variables, watch)
            self._elastic.end()
            start.note(end.processes)
            if is_growing.is_set() and not end.received and not start.is_completed():
                logger.info("More workers can run: starting again with more of them.")
            else:
                failure = first_failure(end.exits)
                if failure is None:
                    return 0
                if not self._is_restart(start, failure, end, placement.world_size):
                    is_interrupted = signal.SIGINT in end.received and failure.signal is not None
                    return _INTERRUPTED if is_interrupted else failure.code
            self._variables |= start.resume_variables()

    def _is_restart(
        self, start: Start, failure: WorkerExit, end: WorkersEnd, world_size: int
    ) -> bool:
        verdict = start.follow(self._restarts, failure, end.received)
        text = describe_failure(failure, world_size)
        if verdict.is_restart:
            logger.warning("%s; starting the workers again, %s.", text, verdict.text)
        else:
            reason = f", {verdict.text}" if verdict.text else ""
            logger.error("%s%s; its output is above.", text, reason)
        return verdict.is_restart

    def _await_workers(self) -> int:
        """Return how many workers to start, once enough can run."""
        while True:
            step = self._elastic.decide(self._capacity(), time.monotonic())
            if isinstance(step, GiveUp):
                raise WorkerStartError(
                    f"At least {step.wanted} worker(s) must be able to run, but no more than"
                    f" {step.available} could at last, after a wait of {step.waited_s:.3g} s."
                )
            if not isinstance(step, Wait):
                return step.num_workers
            if step.is_new:
                logger.warning(
                    "At least %d worker(s) are wanted, but only %d can run: looking again in"
                    " %.3g s.",
                    step.wanted,
                    step.available,
                    step.delay_s,
                )
            time.sleep(step.delay_s)

    @contextmanager
    def _growing(
        self, group: LocalGroup, start: Start, is_growing: threading.Event
    ) -> Iterator[None]:
        """End the group right after a checkpoint once more workers can run."""
        is_over = threading.Event()

        def look() -> None:
            num_before: int | None = None
            while not is_over.wait(_LOOK_INTERVAL_S):
                if self._elastic.growth(self._capacity()) is None:
                    num_before = None
                    continue
                start.note(group.processes)
                number = start.num_checkpoints()
                if num_before is not None and number > num_before:
                    is_growing.set()
                    group.request_stop(self._options.grace_s)
                    return
                num_before = number

        thread = threading.Thread(target=look, name="paceline-growth", daemon=True)
        if self._is_elastic:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            if self._is_elastic:
                thread.join()
