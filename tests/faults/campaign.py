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

from fault_lab.checker import Verdict
from fault_lab.disturbances import Failures, Kills
from fault_lab.power_round import Recording
from fault_lab.round import Round
from fault_lab.scripts import SEARCHES, Search

KILLS_A_ROUND = 8
FAILURES_A_ROUND = 10
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

        for search in {_search_of(n).name for n in range(first, last or first + 20)}:
            self.outcome_of(SEARCHES[search])
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
        search = _search_of(number)
        disturb = (
            Kills(number, KILLS_A_ROUND) if kind == "kill" else Failures(number, FAILURES_A_ROUND)
        )
        round_ = Round(self.directory / f"{kind}-{number}", search)
        try:
            round_.run(disturb)
            disturb.finish(round_)
            verdict = round_.judge(self.outcome_of(search))
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

    def outcome_of(self, search: Search) -> list[Any]:
        """Return the outcome of a search that nobody disturbs."""
        if search.name not in self._undisturbed:
            round_ = Round(self.directory / f"undisturbed-{search.name}", search)
            round_.run(lambda _: time.sleep(0.1))
            self._undisturbed[search.name] = round_.outcome()
            problems = round_.judge(self._undisturbed[search.name]).problems
            assert not problems, problems
            round_.remove()
        return self._undisturbed[search.name]

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


def _search_of(number: int) -> Search:
    """Most rounds have one process; starting three with torch takes ten times as long."""
    if number % 20 == 19:
        return SEARCHES["trainer"]
    return SEARCHES["three" if number % 5 == 4 else "one"]


def main() -> int:
    """Run the campaigns that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", dest="kill", type=int, default=0)
    parser.add_argument("--failures", dest="failure", type=int, default=0)
    parser.add_argument("--power-losses", dest="power", type=int, default=0)
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
        for kind in ("kill", "failure", "power"):
            if wanted := vars(given)[kind]:
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
