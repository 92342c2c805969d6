"""Measure what a framework adds to a training step, and print a table.

Usage: python benchmarks/step_cost.py [--quick] [--out FILE] [NAME ...]

Blocks of a framework's steps and of bare steps take turns within one process, about 20 ms each, so
that both meet the same machine; the difference is that of neighbouring blocks. Frameworks take
turns too, each round in a process of its own. The intervals are 95 % bootstrap intervals of the
median over all rounds and blocks.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Pair = tuple[float, float]

_WARM_BLOCKS = 3
_NUM_RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a framework costs at one length of step, in microseconds per step.

    Attributes:
        framework: Its name.
        work_ms: The work of a step, in milliseconds.
        rounds: For each round, the steps of a framework's block and of its neighbour without it.
    """

    framework: str
    work_ms: float
    rounds: list[list[Pair]]

    def interval(self, of: Callable[[Pair], float]) -> tuple[float, float, float]:
        """Return the median of a quantity of blocks and the bounds of its interval."""
        drawn = random.Random(0)
        values = [[of(pair) for pair in pairs] for pairs in self.rounds]
        medians = sorted(
            statistics.median(_resampled(drawn, values)) for _ in range(_NUM_RESAMPLES)
        )
        low, high = medians[_NUM_RESAMPLES // 40], medians[-_NUM_RESAMPLES // 40]
        return statistics.median(value for block in values for value in block), low, high

    def row(self) -> str:
        """Return a line of the table."""
        bare = statistics.median(pair[1] for pairs in self.rounds for pair in pairs)
        cost, low, high = self.interval(lambda pair: pair[0] - pair[1])
        ratio, ratio_low, ratio_high = self.interval(lambda pair: pair[0] / pair[1])
        return (
            f"| {self.framework} | {self.work_ms:g} ms | {bare:,.0f} us | {cost:,.1f} us"
            f" ({low:,.1f} to {high:,.1f}) | {ratio:.3f} ({ratio_low:.3f} to {ratio_high:.3f}) |"
        )


def _resampled(drawn: random.Random, values: list[list[float]]) -> list[float]:
    """Draw rounds, and blocks within each, with replacement."""
    rounds = drawn.choices(values, k=len(values))
    return [value for block in rounds for value in drawn.choices(block, k=len(block))]


def measure(
    frameworks: Sequence[str], works_ms: Sequence[float], num_rounds: int, num_blocks: int
) -> list[StepCost]:
    """Measure frameworks in turn; longer steps get fewer blocks."""
    costs = [
        StepCost(framework=name, work_ms=work_ms, rounds=[])
        for work_ms in works_ms
        for name in frameworks
    ]
    for _ in range(num_rounds):
        for cost in costs:
            blocks = max(3, round(num_blocks / (1 + 3 * cost.work_ms)))
            command = [sys.executable, __file__, "--child", cost.framework]
            command += ["--work-ms", str(cost.work_ms), "--blocks", str(blocks + _WARM_BLOCKS)]
            done = subprocess.run(command, capture_output=True, text=True, env=_environment())
            assert not done.returncode, done.stderr
            pairs = json.loads(done.stdout.splitlines()[-1])
            cost.rounds.append(pairs[_WARM_BLOCKS:])
    return costs


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "DET_"))}
    return kept | {"OMP_NUM_THREADS": "1"}


def _run_child(framework: str, work_ms: float, num_blocks: int) -> None:
    from step_loops import LOOPS, num_products_of, paired_blocks

    num_products = num_products_of(work_ms / 1000)
    print(json.dumps(paired_blocks(LOOPS[framework], num_blocks, num_products)))


def print_table(costs: Sequence[StepCost]) -> None:
    """Print all costs as a Markdown table."""
    print("| framework | work in a step | bare step | over bare (95 %) | ratio (95 %) |")
    print("|---|---|---|---|---|")
    for cost in costs:
        print(cost.row())


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="frameworks; paceline by default")
    parser.add_argument("--quick", action="store_true", help="the null model only, in 20 s")
    parser.add_argument("--out", type=Path, help="where to keep the raw figures")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work-ms", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return _run_child(given.child, given.work_ms, given.blocks)
    works_ms = [0.0] if given.quick else [0.0, 1.0, 10.0]
    num_rounds = 3 if given.quick else given.rounds
    costs = measure(given.names or ["paceline"], works_ms, num_rounds, given.blocks)
    print_table(costs)
    if given.out is not None:
        given.out.write_text(json.dumps([asdict(cost) for cost in costs]) + "\n")
    return None


if __name__ == "__main__":
    main()
