"""Power losses: a recorded search is stopped at some record, and goes on from what the disk has."""

import json
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fault_lab.checker import Verdict, check_checkpoints, check_decisions, read_notes
from fault_lab.library import UNLINK, WRITE, Record
from fault_lab.power import History, Loss, restore
from fault_lab.round import Round
from fault_lab.scripts import Search
from paceline.storage import CheckpointError, DirectoryStorage


class Recording:
    """A search that nobody disturbs, with all changes of its files."""

    def __init__(self, directory: Path, search: Search) -> None:
        self.round = Round(directory, search)
        self.round.record()
        self.round.run(lambda _: time.sleep(0.1))
        [self.undisturbed] = self.round.outcomes().values()
        self.created_at = self.round.created_at
        self.round.master.send(signal.SIGTERM)
        with suppress(Exception):
            self.round.master.wait(30)
        self.round.end()
        while self.round.processes():
            time.sleep(0.05)
        self.records = list(self.round.lab.records())
        self.round.lab.set_rules()

    def lose(self, seed: int, *, goes_on: bool = True) -> tuple[str, Verdict]:
        """Stop the machine at a record, start a master on what is left, and judge it.

        Returns:
            What was lost, and the verdict.
        """
        chosen = random.Random(seed)
        last = chosen.randint(1, self.records[-1].order)
        history = History(self.round.root).follow(self.records, last)
        loss = Loss(seed, history)
        self.round.end()
        restore(history, loss)
        done = [record for record in self.records if record.order <= last]
        notes = self._notes(done)
        verdict = self.round.verdict = Verdict()
        kind = f"at {last} of {self.records[-1].order}, {loss.kind}"
        self.round.master.start(**self.round.lab.environment)
        if not self.round.master.is_alive:
            verdict.lost.append(f"the master does not start: {self.round.log()}")
            return kind, verdict
        self._check(done, notes, verdict)
        if goes_on and not verdict.lost:
            self.round.note_strike()
            self._go_on(notes, verdict)
        self.round.end()
        return kind, verdict

    def _notes(self, done: list[Record]) -> list[list[Any]]:
        """Put the notes back, which are of the test and so survive."""
        path = self.round.notes
        written = [r.data for r in done if r.kind == WRITE and r.path == str(path)]
        path.unlink(missing_ok=True)
        path.write_bytes(b"".join(written))
        return read_notes(path)

    def _check(self, done: list[Record], notes: list[list[Any]], verdict: Verdict) -> None:
        client = self.round.client()
        last = done[-1].order
        known = client.list_experiments()
        if self.created_at <= last:
            verdict.num_acknowledged += 1
            if not known:
                verdict.lost.append("the experiment")
                return
            if not list(self.round.home.glob("contexts/*.tar.gz")):
                verdict.lost.append("the code")
        trials = {trial.id: trial for trial in known[0].trials()} if known else {}
        for wanted in {note[1] for note in notes}:
            verdict.num_acknowledged += 1
            found = trials.get(wanted)
            told = next(t for t in self.undisturbed[0] if t[0] == wanted)
            if found is None or found.hparams != told[1]:
                verdict.lost.append(f"trial {wanted}, which had reported")
        deleted = {
            Path(r.path).parent.name
            for r in self.records
            if r.kind == UNLINK and r.path.endswith("manifest.json") and r.order <= last
        }
        storage = DirectoryStorage(self.round.home / "checkpoints")
        # The master that has started may have deleted the earlier ones of each trial meanwhile.
        latest = {note[1]: note for note in notes if note[0] == "stored"}
        for _, trial_id, step, *rest in latest.values():
            if rest[0] in deleted:
                continue
            verdict.num_acknowledged += 1
            try:
                problems = storage.problems(storage.manifest(rest[0]))
            except (CheckpointError, OSError) as error:
                problems = {"manifest": str(error)}
            if problems:
                verdict.lost.append(f"checkpoint {step} of trial {trial_id}: {problems}")

    def _go_on(self, notes: list[list[Any]], verdict: Verdict) -> None:
        self.round.run(lambda _: time.sleep(0.1))
        if verdict.hangs:
            return
        client = self.round.client()
        check_decisions(client.get_experiment(1), self.round.home, self.undisturbed, verdict)
        for trial in client.get_experiment(1).trials():
            rows = [
                (r.steps_completed, r.metrics["loss"]) for r in trial.iter_metrics("validation")
            ]
            if len(rows) != len({step for step, _ in rows}):
                verdict.doubled.append(f"validation of trial {trial.id}: {rows}")
            told = {
                (n[2], n[3]) for n in read_notes(self.round.notes) if n[:2] == ["report", trial.id]
            }
            if json.loads(json.dumps(rows)) and not set(rows) <= told:
                verdict.lost.append(f"trial {trial.id} has {rows}, reported {sorted(told)}")
        check_checkpoints(self.round.home, [], verdict)
        verdict.checkpoints += [
            f"loaded wrongly: {note}" for note in read_notes(self.round.notes) if "wrong" in note[0]
        ]
