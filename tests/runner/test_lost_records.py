"""Damage to a journal, from the byte on the disk to what the trial says of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Reports of three ranks; all but two are written while no master is there to take them.
SCRIPT = """
import os, time
from pathlib import Path
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline.journal import AttemptFinished, MetricsReported

root = Path(os.environ["PACELINE_RUN_DIR"]) / "journal"
journals = [JournalWriter(root / f"a1.g0.r{{rank}}") for rank in range(3)]
for step in range(1, 10):
    for rank, journal in enumerate(journals):
        journal.append(MetricsReported(
            time=0.0, group=f"rank {{rank}}", steps_completed=step, metrics={{"x": step}}))
    while step == 2 and not os.path.exists({go!r}):
        time.sleep(0.02)
for journal in journals:
    journal.append(AttemptFinished(time=1.0, outcome="completed"))
    journal.close()
print("written", flush=True)
Path({go!r} + ".written").touch()
while not os.path.exists({go!r} + ".again"):
    time.sleep(0.02)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "line", "steps"),
    [
        # The header comes first; the last line is the attempt's end.
        (0, -1, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (2, 5, [1, 2, 3, 4, 6, 7, 8, 9]),
        pytest.param(0, 5, [1, 2, 3, 4, 6, 7, 8, 9], marks=pytest.mark.slow),
        pytest.param(2, -1, [1, 2, 3, 4, 5, 6, 7, 8, 9], marks=pytest.mark.slow),
    ],
)
def test_one_flipped_byte_is_told_by_the_trial(
    master: Any, tmp_path: Path, wait_until: Callable[..., None], rank: int, line: int,
    steps: list[int],
) -> None:  # fmt: skip
    go = tmp_path / "go"
    master.start()
    experiment_id = master.create(SCRIPT.format(go=str(go)))
    wait_until(lambda: len(master.trial(experiment_id)["summary"]) == 3)
    master.kill()
    go.touch()
    wait_until((tmp_path / "go.written").exists)
    flip(master.home / "attempts" / "1" / "run" / "journal" / f"a1.g0.r{rank}", line)
    master.start()
    (tmp_path / "go.again").touch()
    trial = master.wait_for_end(experiment_id)
    for other in range(3):
        rows = master.read("/trials/1/metrics", group=f"rank {other}")["items"]
        expected = steps if other == rank else list(range(1, 10))
        assert [row["steps_completed"] for row in rows] == expected
    assert (trial["state"], trial["num_records_lost"]) == ("COMPLETED", 1)
    assert master.read(f"/experiments/{experiment_id}")["num_records_lost"] == 1
    [told] = master.read("/trials/1/logs", stream="master")["items"]
    assert f"of rank {rank} (generation 0)" in told["text"]
    assert told["level"] == "ERROR"


def flip(journal: Path, number: int) -> None:
    """Flip a bit in the middle of a line."""
    [path] = journal.iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    line = bytearray(lines[number])
    line[len(line) // 2] ^= 1
    lines[number] = bytes(line)
    path.write_bytes(b"".join(lines))
