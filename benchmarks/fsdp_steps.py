"""Measure what Paceline adds to a step of FSDP2 on two ranks, beside a bare loop.

Usage: python benchmarks/fsdp_steps.py [--blocks N] [--rounds N]

Blocks of steps of a trial with `data_parallel="fsdp"` and of a bare loop over a model that
`fully_shard` divides alike take turns in the same processes, which gloo joins. A barrier comes
before each block. A value is the difference of two neighbouring blocks on the slower rank; the
processor time of all threads of a rank is little changed by other programs on the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import Figure, print_table

_SELF = Path(__file__)
_NUM_RANKS, _NUM_WARM = 2, 3

# Microseconds per step of our block and of the bare one, and the same of processor time.
Blocks = list[tuple[float, float, float, float]]


def measure(num_blocks: int, device: str = "cpu") -> Blocks:
    """Return the times of our blocks, and of the bare blocks after them."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    command = [sys.executable, "-m", "paceline.launch.torch_distributed"]
    command += ["--nproc-per-node", str(_NUM_RANKS), "--", str(_SELF)]
    command += ["--child", "--blocks", str(num_blocks + _NUM_WARM), "--device", device]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=directory, check=False,
            env=kept | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert not done.returncode, done.stderr
        blocks: Blocks = json.loads(Path(directory, "blocks.json").read_text())
    return blocks[_NUM_WARM:]


def measure_fsdp_steps(
    num_blocks: int = 40, num_rounds: int = 3, device: str = "cpu"
) -> list[Figure]:
    """A step of FSDP2 on two ranks, beside a bare loop's."""
    blocks = [block for _ in range(num_rounds) for block in measure(num_blocks, device)]
    what = "a step of FSDP2 on 2 ranks, beyond a bare loop's in the same processes"
    bare_us, bare_cpu_us = (statistics.median(b[index] for b in blocks) for index in (1, 3))
    return [
        Figure(what=what, unit="us", values=[b[0] - b[1] for b in blocks], bar=20.0,
               beside=f"bare step: {bare_us:,.0f} us", raw={"blocks": blocks}),
        Figure(what=f"processor time of {what}", unit="us", values=[b[2] - b[3] for b in blocks],
               bar=None, beside=f"bare step: {bare_cpu_us:,.0f} us"),
    ]  # fmt: skip


def main() -> None:
    """Print the table, or be a rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        from fsdp_rank import run_blocks

        run_blocks(given.blocks, given.device)
        return
    print_table(measure_fsdp_steps(given.blocks, given.rounds, given.device))


if __name__ == "__main__":
    main()
