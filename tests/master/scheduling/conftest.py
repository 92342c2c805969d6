"""Path of the simulation of queues, which the benchmarks have."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
