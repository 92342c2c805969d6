"""One round: a search that is disturbed, brought to its end, and judged."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fault_lab.checker import (
    Verdict,
    check_checkpoints,
    check_decisions,
    check_reports,
    given_away,
    outcome,
    read_notes,
)
from fault_lab.library import FaultLab
from fault_lab.masters import MasterProcess
from fault_lab.processes import Found, processes_of
from fault_lab.scripts import Search
from paceline.client import Client, ClientError, Experiment

DEADLINE_S = 240.0
# A master that refuses to write until it is started again is started again after so long.
_STUCK_S = 40.0
_LEAVE_S = 30.0


class Round:
    """A home, its master and searches, in a laboratory of their own.

    Everything is below `directory`: `root` has what is recorded, with the home and the notes.
    """

    deadline_s = DEADLINE_S
    stuck_s = _STUCK_S

    def __init__(self, directory: Path, *searches: Search) -> None:
        self.directory = directory
        self.searches = searches
        self.lab = FaultLab(directory / "lab")
        self.root = directory / "root"
        self.root.mkdir()
        self.home = self.root / "home"
        self.notes = self.root / "notes"
        for search in searches:
            search.write_context(directory / "contexts" / search.name)
        self.master = MasterProcess(self.home, max(search.num_ranks for search in searches))
        self.verdict = Verdict()
        self.created_at = 0
        self.is_recording = False
        self._struck_at: float | None = None
        self._progress = 0

    def record(self) -> None:
        """Record all changes of files from now on; syncs do not wait for the disk."""
        self.is_recording = True
        self.lab.set_rules(f"record root={self.root} sync=skip")

    def start(self) -> None:
        """Start a master, as often as it takes."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.master.is_alive:
            assert time.monotonic() < deadline, f"The master does not start: {self.log()}"
            environment = self.lab.environment | {"PYTHONFAULTHANDLER": "1"}
            self.master.start(PACELINE_LOG_LEVEL="INFO", **environment)

    def client(self) -> Client:
        """Return a client of the master that runs now."""
        return self.master.client()

    def experiments(self) -> list[Experiment]:
        """Return the experiments of the searches, created if they are not known to exist.

        Raises:
            ClientError: The master does not answer, or not as wanted.
        """
        client = self.client()
        known = {one.name: one for one in client.list_experiments()}
        for search in self.searches:
            if search.name not in known:
                known[search.name] = self._creator(search).create_experiment(
                    search.config(self.notes), self.directory / "contexts" / search.name
                )
                self.created_at = self.lab.order
        return [known[search.name] for search in self.searches]

    def _creator(self, search: Search) -> Client:
        """Return a client of the user whose search it is."""
        return self.client()

    def strike(self, kill: Found) -> bool:
        """Kill a process and measure until work goes on."""
        if not kill.kill():
            return False
        self.note_strike()
        return True

    def note_strike(self) -> None:
        """Measure from now on until work goes on."""
        self._struck_at = self._struck_at or time.monotonic()

    def processes(self) -> list[Found]:
        """Return all living processes."""
        return processes_of(self.lab.directory)

    def run(self, disturb: Callable[["Round"], None]) -> Verdict:
        """Run the search to its end, calling `disturb` again and again, and judge it."""
        deadline = time.monotonic() + self.deadline_s
        last_progress = time.monotonic()
        while True:
            if not self.master.is_alive:
                self.start()
            if self._has_progress():
                last_progress = time.monotonic()
            with suppress(ClientError, OSError, ValueError):
                if all(one.state.is_terminal for one in self.experiments()):
                    break
            if time.monotonic() > deadline:
                state = f"{self._state()} after {self.deadline_s:g} s"
                self.verdict.hangs.append(f"{state}\n{self._stacks()}")
                return self.verdict
            if time.monotonic() - last_progress > self.stuck_s:
                self.master.kill()
                last_progress = time.monotonic()
            disturb(self)
        if not self.is_recording:
            self.lab.set_rules()
        self._has_progress()
        if not self.master.is_alive:
            self.start()
        return self.verdict

    def judge(self, undisturbed: dict[str, list[Any]]) -> Verdict:
        """Check what is stored, then stop the master and look for what stayed.

        Args:
            undisturbed: The outcomes that searches have which nobody disturbs, by name.
        """
        if self.verdict.hangs:
            return self.verdict
        self._settle()
        notes, trials = read_notes(self.notes), []
        for search, experiment in zip(self.searches, self.experiments(), strict=True):
            if experiment.state.value != "COMPLETED":
                self.verdict.decisions.append(f"experiment {search.name} is {experiment.state}")
            check_decisions(experiment, self.home, undisturbed.get(search.name), self.verdict)
            trials += experiment.trials()
        num_torn = sum(hit.path.endswith(".journal") for hit in self.lab.hits())
        unsent = given_away(trials)
        check_reports(trials, notes, self.verdict, num_torn, unsent)
        check_checkpoints(self.home, notes, self.verdict, unsent)
        self._check_orphans()
        return self.verdict

    def outcomes(self) -> dict[str, list[Any]]:
        """Return the outcomes of the searches by name, to compare others with."""
        self._settle()
        return {
            search.name: json.loads(json.dumps(outcome(experiment, self.home)))
            for search, experiment in zip(self.searches, self.experiments(), strict=True)
        }

    def log(self) -> str:
        """Return the end of the master's log."""
        with suppress(FileNotFoundError):
            return (self.home / "master.log").read_text(errors="replace")[-3000:]
        return ""

    def end(self) -> None:
        """Kill all processes."""
        with suppress(Exception):
            self.master.close()
        for found in self.processes():
            found.kill()

    def remove(self) -> None:
        """End all processes and remove all files."""
        self.end()
        self.lab.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _settle(self) -> None:
        """Wait until the last attempt's end is stored: runners outlive their trial."""
        deadline = time.monotonic() + _LEAVE_S
        while any(f.kind == "runner" for f in self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _stop_all(self) -> None:
        self.master.send(signal.SIGTERM)
        with suppress(Exception):
            self.master.wait(_LEAVE_S)

    def _check_orphans(self) -> None:
        self._stop_all()
        deadline = time.monotonic() + _LEAVE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.verdict.orphans += [f"{found.kind} {found.text}" for found in left]

    def _has_progress(self) -> bool:
        size = self.notes.stat().st_size if self.notes.exists() else 0
        if size == self._progress:
            return False
        self._progress = size
        if self._struck_at is not None:
            took = time.monotonic() - self._struck_at
            self.verdict.recovery_s = max(self.verdict.recovery_s, took)
            self._struck_at = None
        return True

    def _stacks(self) -> str:
        """End all processes, and return where each of their threads was."""
        self.master.send(signal.SIGSTOP)
        order = {"loader": 0, "training": 0, "launcher": 1, "runner": 2, "host": 2}
        texts = []
        for found in sorted(self.processes(), key=lambda one: order.get(one.kind, 3)):
            status = Path(f"/proc/{found.pid}/status").read_text().splitlines()[:8]
            wait = Path(f"/proc/{found.pid}/wchan").read_text()
            texts.append(f"{found.pid} {found.kind} {found.text} {wait} {status}")
            # Python's fault handler writes them to the standard error: the output or a log.
            with suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGABRT)
            time.sleep(0.5)
        for path in (*self.home.glob("attempts/*/*"), self.home / "master.log"):
            if path.name in ("output.jsonl", "runner.log", "master.log", "process.json"):
                texts.append(f"{path}:\n{path.read_text(errors='replace')[-6000:]}")
        return "\n".join(texts)

    def _state(self) -> str:
        try:
            trials = [(t.id, t.state.value) for one in self.experiments() for t in one.trials()]
        except Exception as error:
            trials = [repr(error)]
        return f"{trials}, {sorted(f.kind for f in self.processes())}, log: {self.log()}"
