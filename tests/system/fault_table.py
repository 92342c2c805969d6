"""Print the cells of the fault matrix as a table, from the file that its tests have written.

Run as ``python fault_table.py CELLS``; `make fault-matrix` does both.
"""

import json
import sys
from pathlib import Path

_DOORS = ("train", "creators", "Ray pool", "pytorch.launch", "launcher", "trial")


def main(cells: Path) -> None:
    """Print one row for each fault: seconds on rank 0 and rank 2 for each door, and a message."""
    seconds: dict[tuple[str, str, int], float] = {}
    told: dict[str, dict[str, str]] = {}
    for line in cells.read_text().splitlines():
        fault, rank, door, elapsed_s, _, text = json.loads(line)
        seconds[fault, door, rank] = elapsed_s
        if rank == 2:
            told.setdefault(fault, {})[door] = _shortened(text)
    print(f"| fault | {' | '.join(_DOORS)} | train says | launcher says |")
    print("|---" * (len(_DOORS) + 3) + "|")
    for fault, by_door in told.items():
        times = [
            " / ".join(f"{seconds.get((fault, door, rank), -1):.1f}" for rank in (0, 2))
            for door in _DOORS
        ]
        texts = [by_door.get("train", ""), by_door.get("launcher", "")]
        print(f"| `{fault}` | {' | '.join([*times, *texts])} |")


def _shortened(text: str) -> str:
    """Return a message without what the logger or Python has put before it."""
    for mark in ("Error: ", "_generation: ", "ERROR: "):
        if mark in text and not text.startswith("Rank"):
            text = text.partition(mark)[2]
    return text.replace("|", "\\|")[:160]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
