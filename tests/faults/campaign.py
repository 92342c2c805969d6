"""Campaigns of faults against whole masters, with a table at the end: see `make faults`.

Each round follows from its number, which is printed with what it found: `--repeat KIND NUMBER` runs
it alone.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
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
LOSSES_A_RECORDING = 25
_COLUMNS = ("lost", "doubled", "decisions", "checkpoints", "orphans", "hangs")


class Campaign:
    """Rounds of all kinds, in a directory; what is wrong is printed at once."""

    def __init__(self, directory: Path, minutes: float) -> None:
        self.directory = directory
        self._until = time.monotonic() + 60 * minutes
        self._undisturbed: dict[str, list[Any]] = {}
        self.rows: list[tuple[str, int, int, list[Verdict]]] = []
        self.struck: Counter[str] = Counter()

    def run(self, kind: str, wanted: int, first: int = 0, last: int | None = None) -> None:
        """Run rounds of a kind until there were so many disturbances, or the time is over."""
        verdicts: list[Verdict] = []
        num_made, number = 0, first
        while num_made < wanted and time.monotonic() < self._until and number != last:
            made, verdict = self.run_round(kind, number)
            num_made += made
            verdicts.append(verdict)
            number += 1
            print(f"{kind} {number - 1}: {made}, {len(verdict.problems)} problems", flush=True)
            for problem in verdict.problems:
                print(f"  {problem}", flush=True)
        self.rows.append((kind, len(verdicts), num_made, verdicts))

    def run_power_losses(self, wanted: int, first: int = 0) -> None:
        """Stop recorded searches at random records; each recording serves a while."""
        verdicts: list[Verdict] = []
        recording: Recording | None = None
        for number in range(first, first + wanted):
            if time.monotonic() > self._until:
                break
            if recording is None or number % LOSSES_A_RECORDING == 0:
                if recording is not None:
                    recording.round.remove()
                directory = self.directory / f"power-{number}"
                recording = Recording(directory, SEARCHES["one"])
            what, verdict = recording.lose(number)
            verdicts.append(verdict)
            self.struck[what.rpartition(", ")[2]] += 1
            print(f"power {number}: {what}, {len(verdict.problems)} problems", flush=True)
            for problem in verdict.problems:
                print(f"  {problem}", flush=True)
            if verdict.problems:
                kept = self.directory / f"power-{number}-left"
                shutil.copytree(recording.round.root, kept, symlinks=True)
        if recording is not None:
            recording.round.remove()
        self.rows.append(("power", len(verdicts), len(verdicts), verdicts))

    def run_round(self, kind: str, number: int) -> tuple[int, Verdict]:
        """Run one round; the files of one with problems stay."""
        search = _search_of(number)
        undisturbed = self._outcome_of(search)
        disturb = (
            Kills(number, KILLS_A_ROUND) if kind == "kill" else Failures(number, FAILURES_A_ROUND)
        )
        round_ = Round(self.directory / f"{kind}-{number}", search)
        try:
            round_.run(disturb)
            disturb.finish(round_)
            verdict = round_.judge(undisturbed)
        except Exception as error:
            verdict = round_.verdict
            verdict.hangs.append(f"{type(error).__name__}: {error}\n{round_.log()}")
        self.struck.update(disturb.kinds)
        if verdict.problems:
            round_.end()
        else:
            round_.remove()
        return disturb.num_made, verdict

    def _outcome_of(self, search: Search) -> list[Any]:
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
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--failures", type=int, default=0)
    parser.add_argument("--power-losses", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no round later")
    parser.add_argument("--directory", type=Path, help="where homes are made")
    parser.add_argument("--repeat", nargs=2, metavar=("KIND", "NUMBER"), help="run one round")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="faults-", dir=given.directory))
    campaign = Campaign(directory, given.minutes)
    if given.repeat and given.repeat[0] == "power":
        campaign.run_power_losses(1, int(given.repeat[1]))
    elif given.repeat:
        campaign.run(given.repeat[0], 1, int(given.repeat[1]), int(given.repeat[1]) + 1)
    else:
        campaign.run("kill", given.kills, given.first)
        campaign.run("failure", given.failures, given.first)
        campaign.run_power_losses(given.power_losses, given.first)
    print(campaign.table())
    print(json.dumps(campaign.struck.most_common()))
    if campaign.num_problems:
        print(f"The homes of rounds with problems are in {directory}.")
    return min(campaign.num_problems, 1)


if __name__ == "__main__":
    sys.exit(main())
