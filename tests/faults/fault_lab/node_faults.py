"""What happens to machines and to the network between them. All of it follows from a number."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from fault_lab.node_round import NodeRound
from fault_lab.nodes import NodeProcess
from paceline.client import ClientError

_PAUSE_S = (0.3, 2.5)
# Longer than a lease in half of the cases.
_LENGTH_S = (0.5, 11.0)
_RESTART_S = (0.0, 4.0)
# By what a process is, see `processes.py`.
_KILLED = {"kill runner": "node", "kill attempt": "runner", "kill training": "training"}


class NodeFaults:
    """Faults of one machine, of all links, or of the master; most end after a while."""

    def __init__(self, seed: int, num_faults: int) -> None:
        self._random = random.Random(seed)
        self._num_left = num_faults
        self._undo: list[tuple[float, Callable[[], object]]] = []
        self._next_at = 0.0
        # What is wrong with a machine or the network now, so that no fault ends another one.
        self._struck: set[object] = set()
        self.num_made = 0
        self.kinds: dict[str, int] = {}
        self._faults: dict[str, Callable[[NodeRound, NodeProcess], bool]] = {
            "kill runner": self._kill_one,
            "kill attempt": self._kill_one,
            "kill training": self._kill_one,
            "kill master": self._kill_master,
            "power cut": self._cut_power,
            "partition": self._cut,
            "nodes apart": self._separate,
            "stop": self._stop,
            "disk full": self._fill,
            "drain": self._drain,
        }
        self._what = ""
        self._planned = self._plan()
        self._log = Path()

    def _plan(self) -> tuple[str, int, float, float]:
        """Choose what comes next, always by equally many numbers."""
        chosen = self._random
        return (
            chosen.choice(sorted(self._faults)),
            chosen.randrange(1000),
            chosen.uniform(*_LENGTH_S),
            chosen.uniform(*_PAUSE_S),
        )

    def __call__(self, round_: NodeRound) -> None:
        """Wait a moment, end what has lasted long enough, and begin at most one fault."""
        time.sleep(0.1)
        self._end_due()
        for node in round_.nodes:
            # As systemd would: one that begins with a full disk ends.
            if node not in self._struck and "must be able to write" in node.log_end():
                round_.start_node(node)
        if self._num_left <= 0 or time.monotonic() < self._next_at or not round_.notes.exists():
            return
        self._what, place, self._length_s, pause_s = self._planned
        node = round_.nodes[place % len(round_.nodes)]
        self._place = place
        self._log = round_.directory / "faults.log"
        if self._faults[self._what](round_, node):
            self._note(f"{self._what} at {node.name}, place {place}")
            round_.note_strike()
            self._num_left -= 1
            self.num_made += 1
            self.kinds[self._what] = self.kinds.get(self._what, 0) + 1
            self._planned = self._plan()
            self._next_at = time.monotonic() + pause_s
        elif node in self._struck or self._what == "nodes apart":
            # Another one at once: this one may be in the way for long.
            self._planned = self._plan()

    def finish(self, round_: NodeRound) -> None:
        """End all faults."""
        while self._undo:
            self._end_due(at_once=True)
            time.sleep(0.1)
        for node in round_.nodes:
            round_.start_node(node)

    def _end_due(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        due = [undo for until, undo in self._undo if at_once or until <= now]
        self._undo = [(until, undo) for until, undo in self._undo if undo not in due]
        for undo in due:
            try:
                undo()
            except (ClientError, OSError):  # there may be no master
                self._undo.append((now + 0.5, undo))

    def _note(self, text: str) -> None:
        """Say in the directory of the round what was done, for whoever looks into a problem."""
        with self._log.open("a") as file:
            file.write(f"{datetime.now():%H:%M:%S.%f} {text}\n")

    def _lasting(self, what: object, undo: Callable[[], object]) -> bool:
        self._struck.add(what)

        kind = self._what

        def end() -> None:
            undo()
            self._struck.discard(what)
            self._note(f"end of {kind}")

        self._undo.append((time.monotonic() + self._length_s, end))
        return True

    # ---- faults; each returns whether it could be made --------------------------------------

    def _kill_one(self, round_: NodeRound, node: NodeProcess) -> bool:
        if node in self._struck:
            return False
        kind = _KILLED[self._what]
        found = [one for one in round_.processes_on(node) if one.kind == kind]
        if not found or not found[self._place % len(found)].kill():
            return False
        if kind == "node":
            assert node.process is not None
            node.process.wait()
            self._length_s = min(self._length_s, _RESTART_S[1])
            return self._lasting(node, lambda: round_.start_node(node))
        return True

    def _kill_master(self, round_: NodeRound, node: NodeProcess) -> bool:
        round_.master.kill()
        return True

    def _cut_power(self, round_: NodeRound, node: NodeProcess) -> bool:
        if node in self._struck:
            return False
        node.close()
        return self._lasting(node, lambda: round_.start_node(node))

    def _cut(self, round_: NodeRound, node: NodeProcess) -> bool:
        if node in self._struck or node.machine is None:
            return False
        node.machine.cut()
        return self._lasting(node, node.machine.heal)

    def _separate(self, round_: NodeRound, node: NodeProcess) -> bool:
        # A link that is cut forgets that it is separate.
        if round_.network in self._struck or self._struck & set(round_.nodes):
            return False
        round_.network.separate(True)
        return self._lasting(round_.network, lambda: round_.network.separate(False))

    def _stop(self, round_: NodeRound, node: NodeProcess) -> bool:
        """Stop all processes of a machine, or one of them."""
        if node in self._struck:
            return False
        found = round_.processes_on(node)
        if self._place % 2:
            found = found[self._place // 2 % max(len(found), 1) :][:1]
        stopped = []
        for one in found:
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGSTOP)
                stopped.append(one.pid)

        def go_on() -> None:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

        return bool(stopped) and self._lasting(node, go_on)

    def _fill(self, round_: NodeRound, node: NodeProcess) -> bool:
        if node in self._struck:
            return False
        round_.fill(node)
        return self._lasting(node, lambda: round_.empty(node))

    def _drain(self, round_: NodeRound, node: NodeProcess) -> bool:
        if node in self._struck:
            return False
        try:
            round_.client().drain_node(node.name)
        except (ClientError, OSError):
            return False
        return self._lasting(node, lambda: round_.client().resume_node(node.name))
