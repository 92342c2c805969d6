"""Campaigns of faults against whole masters, with a table at the end: see `make faults`.

Each round follows from its number, which is printed with what it found: `--repeat KIND NUMBER` runs
it alone.
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "forking"))

from fault_lab.checker import Verdict
from fault_lab.disturbances import Failures, Kills
from fault_lab.machines import has_namespaces
from fault_lab.node_faults import NodeFaults
from fault_lab.node_round import NodeRound
from fault_lab.power_round import Recording
from fault_lab.round import Round
from fault_lab.scripts import SEARCHES, Search

KILLS_A_ROUND = 8
FAILURES_A_ROUND = 10
NODE_FAULTS_A_ROUND = 6
NODE_FAULTS_IN_ROUND_0 = 2
NODE_SEARCHES = ("single", "group")
_COLUMNS = ("lost", "doubled", "decisions", "checkpoints", "orphans", "hangs")


class Campaign:
    """Rounds of all kinds, in a directory; what is wrong is printed at once."""

    def __init__(self, directory: Path, minutes: float, num_jobs: int) -> None:
        self.directory = directory
        self._num_jobs = num_jobs
        self._recordings: list[Recording] = []
        self._recordings_lock = threading.Lock()
        self._until = time.monotonic() + 60 * minutes
        self._undisturbed: dict[str, list[Any]] = {}
        self.rows: list[tuple[str, int, int, list[Verdict]]] = []
        self.struck: dict[str, Counter[str]] = defaultdict(Counter)

    def run(self, kind: str, wanted: int, first: int = 0, last: int | None = None) -> None:
        """Run rounds of a kind until there were so many disturbances, or the time is over."""
        verdicts: list[Verdict] = []
        numbers = itertools.count(first)
        lock = threading.Lock()
        num_made = 0

        def work() -> None:
            nonlocal num_made
            while num_made < wanted and time.monotonic() < self._until:
                number = next(numbers)
                if number == last:
                    return
                what, made, verdict = self.run_round(kind, number)
                with lock:
                    num_made += made
                    verdicts.append(verdict)
                    self.struck[kind].update(what)
                    print(f"{kind} {number}: {made}, {len(verdict.problems)} problems", flush=True)
                    for problem in verdict.problems:
                        print(f"  {problem}", flush=True)

        for number in range(first, last or first + 20):
            if kind != "power":
                self._undisturbed_outcomes(kind, _searches_of(kind, number))
        workers = [threading.Thread(target=work) for _ in range(self._num_jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.rows.append((kind, len(verdicts), num_made, verdicts))

    def run_round(self, kind: str, number: int) -> tuple[dict[str, int], int, Verdict]:
        """Run one round; the files of one with problems stay.

        Returns:
            What was struck how often, how many strikes there were, and the verdict.
        """
        if kind == "power":
            return self._lose_power(number)
        searches = _searches_of(kind, number)
        directory = self.directory / f"{kind}-{number}"
        round_, disturb = _make_round(kind, number, directory, searches)
        try:
            round_.run(disturb)
            disturb.finish(round_)
            verdict = round_.judge(self._undisturbed_outcomes(kind, searches))
        except Exception as error:
            verdict = round_.verdict
            verdict.hangs.append(f"{type(error).__name__}: {error}\n{round_.log()}")
        if verdict.problems:
            round_.end()
        else:
            round_.remove()
        return disturb.kinds, disturb.num_made, verdict

    def _lose_power(self, number: int) -> tuple[dict[str, int], int, Verdict]:
        """Stop a recorded search at a random record; a recording serves for several losses."""
        with self._recordings_lock:
            recording = self._recordings.pop() if self._recordings else None
        if recording is None:
            recording = Recording(self.directory / f"power-{number}", SEARCHES["one"])
        what, verdict = recording.lose(number)
        print(f"power {number}: {what}", flush=True)
        if verdict.problems:
            left = self.directory / f"power-{number}-left"
            shutil.copytree(recording.round.root, left, symlinks=True)
        with self._recordings_lock:
            self._recordings.append(recording)
        return {what.rpartition(", ")[2]: 1}, 1, verdict

    def close(self) -> None:
        """Remove the recordings."""
        for recording in self._recordings:
            recording.round.remove()

    def _undisturbed_outcomes(self, kind: str, searches: list[Search]) -> dict[str, list[Any]]:
        """Return the outcomes of searches that nobody disturbs, by name."""
        if not self._undisturbed.keys() >= {search.name for search in searches}:
            directory = self.directory / f"undisturbed-{kind}-{searches[0].name}"
            round_ = (NodeRound if kind == "node" else Round)(directory, *searches)
            round_.run(lambda _: time.sleep(0.1))
            outcomes = round_.outcomes()
            problems = round_.judge(outcomes).problems
            assert not problems, problems
            round_.remove()
            self._undisturbed |= outcomes
        return self._undisturbed

    def table(self) -> str:
        """Return what all rounds have shown."""
        heads = ("kind", "rounds", "disturbances", "acknowledged", *_COLUMNS, "longest recovery")
        lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for kind, num_rounds, num_made, verdicts in self.rows:
            counts = [sum(len(getattr(v, name)) for v in verdicts) for name in _COLUMNS]
            acknowledged = sum(v.num_acknowledged for v in verdicts)
            slowest = max((v.recovery_s for v in verdicts), default=0.0)
            cells = [kind, num_rounds, num_made, acknowledged, *counts, f"{slowest:.1f} s"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return "\n".join(lines)

    @property
    def num_problems(self) -> int:
        """How much was found."""
        return sum(len(v.problems) for *_, verdicts in self.rows for v in verdicts)


def _searches_of(kind: str, number: int) -> list[Search]:
    """Most rounds have one process; starting three with torch takes ten times as long."""
    if kind == "node":
        # Round 0 is a small one.
        return [SEARCHES[name] for name in NODE_SEARCHES if number > 0 or name == "group"]
    if number % 20 == 19:
        return [SEARCHES["trainer"]]
    return [SEARCHES["three" if number % 5 == 4 else "one"]]


def _make_round(
    kind: str, number: int, directory: Path, searches: list[Search]
) -> tuple[Round, Any]:
    if kind == "node":
        num_faults = NODE_FAULTS_A_ROUND if number > 0 else NODE_FAULTS_IN_ROUND_0
        return NodeRound(directory, *searches), NodeFaults(number, num_faults)
    round_ = Round(directory, *searches)
    if kind == "kill":
        return round_, Kills(number, KILLS_A_ROUND)
    return round_, Failures(number, FAILURES_A_ROUND)


def main() -> int:
    """Run the campaigns that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", dest="kill", type=int, default=0)
    parser.add_argument("--failures", dest="failure", type=int, default=0)
    parser.add_argument("--power-losses", dest="power", type=int, default=0)
    parser.add_argument("--node-faults", dest="node", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--jobs", type=int, default=4, help="rounds at a time")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no round later")
    parser.add_argument("--directory", type=Path, help="where homes are made")
    parser.add_argument("--repeat", nargs=2, metavar=("KIND", "NUMBER"), help="run one round")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="faults-", dir=given.directory))
    if given.repeat:
        campaign = Campaign(directory, given.minutes, 1)
        campaign.run(given.repeat[0], 1, int(given.repeat[1]), int(given.repeat[1]) + 1)
    else:
        campaign = Campaign(directory, given.minutes, given.jobs)
        for kind in ("kill", "failure", "power", "node"):
            if kind == "node" and given.node and not has_namespaces():
                print("NOT TESTED: faults of nodes need root, `ip` and `bridge`")
            elif wanted := vars(given)[kind]:
                campaign.run(kind, wanted, given.first)
    campaign.close()
    print(campaign.table())
    for kind, counts in campaign.struck.items():
        print(f"{kind}: {json.dumps(dict(counts.most_common()))}")
    if campaign.num_problems:
        print(f"The homes of rounds with problems are in {directory}.")
    return min(campaign.num_problems, 1)


if __name__ == "__main__":
    sys.exit(main())
