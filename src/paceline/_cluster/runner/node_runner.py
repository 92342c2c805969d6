"""Runner of a node: polls the master for attempts and looks after the node's attempts."""

import fcntl
import logging
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from paceline._base.files import open_private, read_secret, write_atomically
from paceline._base.journal_records import seal
from paceline._base.machine_checks import MachineWatch
from paceline._cluster.messages import runner_messages as messages
from paceline._cluster.runner.attempt_processes import AttemptProcesses, WantedAttempts
from paceline._cluster.runner.master_link import (
    MasterBackoff,
    MasterLink,
    RefusedByMasterError,
    TokenRefusedError,
    UnreachableError,
    UntrustedMasterError,
    encode,
)

logger = logging.getLogger(__name__)


_WAIT_S = 30.0
_TICK_S = 0.5
# Poll wait with stray attempts, during leaving or a check: changes must be noticed quickly.
_SHORT_WAIT_S = 1.0
CHECK_EVERY_S = 1800.0
# How long the master may take to answer a runner that leaves.
_LEAVE_S = 10.0
# Another home of the master's, or another token in the file.
_REGISTER_AGAIN = ((404, "unknown_node"), (403, "other_token"))


class NodeStoppedError(Exception):
    """Raised when the master does not want this runner."""


class NodeRunner:
    """Runner serving a node.

    One thread polls; only the thread that calls `run` touches attempts. Between two
    polls, it repeats failed starts and ships the records of dead runners.

    Args:
        url: The address of the master.
        token_path: The file that has the runner's token; it is read again after each failure.
        directory: The runner's own directory, which has the attempts. If it has a certificate of
            the master, `master.pem`, no other one is trusted.
        facts: The facts of this machine.
        idle_timeout_s: After how many seconds without an attempt the runner leaves; None is never.
        check_every_s: Seconds between two checks of the machine; 0 is no check at all.
    """

    def __init__(
        self,
        url: str,
        token_path: Path,
        directory: Path,
        facts: messages.NodeFacts,
        idle_timeout_s: float | None = None,
        check_every_s: float = CHECK_EVERY_S,
    ) -> None:
        self._watch = MachineWatch(directory, check_every_s)
        self._facts = facts
        self._directory = directory
        self._address_path = directory / "master.json"
        self._url = url.rstrip("/")
        self._certificate_path = directory / "master.pem"
        self._idle_timeout_s = idle_timeout_s
        self._busy_at = time.monotonic()
        self._token_path = token_path
        self._link = MasterLink(lambda: self._address(read_secret(token_path)))
        self._processes = AttemptProcesses(directory / "attempts", directory)
        self._questions: queue.SimpleQueue[messages.NodePoll] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[messages.NodeWork | Exception] = queue.SimpleQueue()
        self._number = 0
        self._version = 0
        self._wanted = WantedAttempts(self._processes, self._address_path, self._address)
        self._num_signals = 0
        self._has_strays = False
        self._asked_at = 0.0

    def run(self) -> None:
        """Serve until a signal: the first lets attempts leave, a second leaves them running.

        Raises:
            NodeStoppedError: The master refuses this runner, or another one has taken its place.
        """
        with self._holding():
            self._write(self._address_path, seal(encode(self._address())))
            self._session = self._register()
            self._check_cluster()
            self._watch.start()
            threading.Thread(target=self._poll_all, name="poll", daemon=True).start()
            try:
                self._serve()
            except FileNotFoundError as error:
                if self._directory.exists():
                    raise
                raise NodeStoppedError(
                    f"The directory {str(self._directory)!r} must stay while the runner runs, but"
                    " it is gone. Hint: start the runner again; trials of this node start again"
                    " once the master has missed it for a while."
                ) from error
            finally:
                self._processes.close()

    def stop(self) -> None:
        """Let the attempts leave, then end; a second time end at once. For signal handlers."""
        self._num_signals += 1

    def leave(self) -> None:
        """Let the attempts leave, then end; a second time changes nothing. For signal handlers.

        Slurm and others may send the same signal more than once.
        """
        self._num_signals = max(1, self._num_signals)

    def _address(self, token: str = "") -> messages.MasterAddress:
        path = self._certificate_path
        certificate = path.read_text() if path.exists() else None
        return messages.MasterAddress(url=self._url, token=token, certificate=certificate)

    # ---- asking --------------------------------------------------------------------------

    def _register(self) -> messages.NodeSession:
        pauses, trouble = MasterBackoff(), ""
        while True:
            try:
                reply = self._link.post("/nodes", encode(self._facts))
            except UntrustedMasterError as error:
                raise NodeStoppedError(str(error)) from error
            except UnreachableError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    if isinstance(error, TokenRefusedError):
                        logger.warning(
                            "The master at %s does not take the token in %s: %s The runner asks"
                            " again and again, as the file may get another one.",
                            self._url,
                            self._token_path,
                            error,
                        )
                    else:
                        logger.warning("The master at %s cannot be reached: %s", self._url, error)
                if self._num_signals:
                    raise NodeStoppedError("Stopped before the master answered.") from error
                time.sleep(pauses.next_s())
            except RefusedByMasterError as error:
                raise NodeStoppedError(f"The master refuses this node. {error}") from error
            else:
                session = msgspec.json.decode(reply, type=messages.NodeSession)
                logger.info(
                    "Node %s is registered (id %d, session %d) with %d slots.",
                    self._facts.name, session.node_id, session.session, len(self._facts.devices),
                )  # fmt: skip
                return session

    def _check_cluster(self) -> None:
        path = self._directory / "cluster_id"
        # Bytes that are no text are damaged, and so belong to another master.
        known = path.read_text(errors="replace").strip() if path.exists() else None
        known = known or self._session.cluster_id
        if known != self._session.cluster_id and self._processes.all():
            raise NodeStoppedError(
                f"The directory {str(self._directory)!r} must belong to one master, but holds"
                " attempts of another one. Hint: choose another `--dir`."
            )
        self._write(path, self._session.cluster_id.encode())

    def _write(self, path: Path, data: bytes) -> None:
        with self._naming_directory():
            write_atomically(path, data)

    @contextmanager
    def _naming_directory(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NodeStoppedError(
                f"The runner must be able to write to {str(self._directory)!r}, but: {error}."
            ) from error

    def _poll_all(self) -> None:
        pauses = MasterBackoff()
        while True:
            poll = self._questions.get()
            path = f"/nodes/{self._session.node_id}/poll"
            try:
                # The master may hold the answer back for `wait_s`.
                reply = self._link.post(path, encode(poll), timeout_s=poll.wait_s + 10)
                self._answers.put(msgspec.json.decode(reply, type=messages.NodeWork))
                pauses.reset()
            except Exception as error:
                # The pause is in this thread, as the other one looks after attempts meanwhile.
                time.sleep(pauses.next_s())
                self._answers.put(error)

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        self._questions.put(self._next_poll())

    def _next_poll(self) -> messages.NodePoll:
        attempts = [id_ for id_ in self._processes.all() if self._processes.is_prepared(id_)]
        is_short = self._has_strays or self._num_signals or self._watch.is_checking
        # After a failure the orders are unknown: the next answer must come at once.
        wait_s = 0.0 if self._wanted.ids is None else _SHORT_WAIT_S if is_short else _WAIT_S
        # Number of the poll: the master ignores polls arriving after a later poll.
        self._number += 1
        return messages.NodePoll(
            key=self._facts.key,
            session=self._session.session,
            number=self._number,
            attempts=attempts,
            alive=[id_ for id_ in attempts if self._processes.is_alive(id_)],
            after=self._version,
            # Third of the lease: a long wait must not let the lease run out between two polls.
            wait_s=min(wait_s, self._session.lease_s / 3),
            is_leaving=bool(self._num_signals),
            problem=self._watch.problem[: messages.MAX_PROBLEM],
        )

    # ---- doing ---------------------------------------------------------------------------

    def _serve(self) -> None:
        has_told = False
        trouble = ""
        self._ask()
        while self._num_signals < 2:
            if self._num_signals and not has_told:
                has_told = True
                self._let_leave()
            self._leave_if_idle()
            if has_told and not self._alive():
                self._say_that_it_has_left()
                logger.info("The runner ends; nothing runs on this node.")
                return
            try:
                answer = self._answers.get(timeout=_TICK_S)
            except queue.Empty:
                # Failed starts are repeated although the master is silent.
                self._wanted.look_after({}, [])
                continue
            if isinstance(answer, messages.NodeWork):
                if trouble:
                    logger.info("The master answers again.")
                    trouble = ""
                self._carry_out(answer)
            else:
                if str(answer) != trouble and not _is_final(answer):
                    trouble = str(answer)
                    is_refused = isinstance(answer, RefusedByMasterError)
                    what = "refuses this runner now" if is_refused else "does not answer"
                    logger.warning("The master %s: %s", what, answer)
                self._recover(answer)
            self._ask()
        if left := self._alive():
            logger.warning(
                "The runner ends and leaves %s running. `paceline runner` with the same `--dir`"
                " looks after them again.",
                self._names(left),
            )

    def _leave_if_idle(self) -> None:
        # A trial may wait for the end of a check.
        is_busy = self._processes.all() or self._wanted.ids or self._watch.is_checking
        if is_busy or self._idle_timeout_s is None:
            self._busy_at = time.monotonic()
        elif time.monotonic() > self._busy_at + self._idle_timeout_s and not self._num_signals:
            logger.info("The node was idle for %.0f s and leaves.", self._idle_timeout_s)
            self.leave()

    def _carry_out(self, work: messages.NodeWork) -> None:
        self._version, self._has_strays = work.version, work.strays
        self._wanted.ids = set(work.wanted)
        launches = {launch.spec.attempt_id: launch for launch in work.launches}
        # Old answers start nothing: their attempts may have been given to other nodes since.
        is_old = time.monotonic() - self._asked_at > self._session.lease_s / 2
        if is_old or self._num_signals:
            launches = {}
        self._wanted.look_after(launches, work.kill)

    def _recover(self, error: Exception) -> None:
        if _is_final(error):
            raise NodeStoppedError(f"The master wants no more polls of this runner. {error}")
        if isinstance(error, RefusedByMasterError):
            self._session = self._register()
            self._check_cluster()
            self._number = 0

    def _let_leave(self) -> None:
        """Have all attempts store a checkpoint and end, as if the machine shut down."""
        self._log_stop()
        # First, so that none of them comes back here; the poll that waits is overtaken.
        poll = msgspec.structs.replace(self._next_poll(), wait_s=0.0)
        with suppress(UnreachableError, RefusedByMasterError):
            path = f"/nodes/{self._session.node_id}/poll"
            self._link.another().post(path, encode(poll), timeout_s=_LEAVE_S)
        for attempt_id in self._processes.all():
            self._processes.signal_runner(attempt_id, signal.SIGTERM)

    def _log_stop(self) -> None:
        # Loaded late: it needs much that a runner without attempts does not.
        from paceline._cluster.runner.master_follower import TERMINATION_S

        alive = self._alive()
        if not alive:
            logger.info("The runner stops: this node takes no more attempts, and none runs here.")
            return
        logger.info(
            "The runner stops: this node takes no more attempts. It waits for %s: up to %.0f s to"
            " store a checkpoint and end, and then until the rest is sent. Another Ctrl-C ends the"
            " runner at once.",
            self._names(alive),
            TERMINATION_S,
        )

    def _alive(self) -> list[int]:
        return [id_ for id_ in self._processes.all() if self._processes.is_alive(id_)]

    def _names(self, attempts: list[int]) -> str:
        """Return the number of attempts and their trials, for log messages."""
        trials = []
        for attempt_id in attempts:
            with suppress(OSError, msgspec.DecodeError):
                trials.append(self._processes.directory(attempt_id).read_spec().trial_id)
        plural = "s" * (len(attempts) > 1)
        return f"{len(attempts)} attempt{plural} (trial {', '.join(map(str, sorted(trials)))})"

    def _say_that_it_has_left(self) -> None:
        """Report the departure to the master, so nothing waits for the lease to expire."""
        path = f"/nodes/{self._session.node_id}/poll"
        with suppress(UnreachableError, RefusedByMasterError):
            # The second poll reports the cleaned attempts.
            for _ in range(2):
                poll = msgspec.structs.replace(self._next_poll(), wait_s=0.0)
                reply = self._link.another().post(path, encode(poll), timeout_s=_LEAVE_S)
                if not poll.attempts:
                    return
                self._processes.clean(
                    set(msgspec.json.decode(reply, type=messages.NodeWork).wanted)
                )

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Hold the directory's lock, so only a single runner serves the directory."""
        with self._naming_directory():
            lock = open_private(self._directory / "runner.lock", "a+")
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise NodeStoppedError(
                    f"The directory {str(self._directory)!r} must have one runner, but another one"
                    " serves it. Hint: choose another `--dir` and `--name` for a second one."
                ) from error
            yield


def _is_final(error: Exception) -> bool:
    """Return whether the master's refusal of a poll is final, so the runner must end."""
    if not isinstance(error, RefusedByMasterError):
        return False
    return (error.status, error.code) not in _REGISTER_AGAIN
