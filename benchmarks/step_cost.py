"""Measure what a framework adds to a training step, and print a table.

Usage: python benchmarks/step_cost.py [--quick] [NAME ...]

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Pair = tuple[float, float]

_SELF = Path(__file__)
_NUM_WARM = 2
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

    @property
    def bare_us(self) -> float:
        """The median of the steps without the framework."""
        return statistics.median(pair[1] for pairs in self.rounds for pair in pairs)

    def row(self) -> str:
        """Return a line of the table."""
        cost, low, high = self.interval(lambda pair: pair[0] - pair[1])
        ratio, ratio_low, ratio_high = self.interval(lambda pair: pair[0] / pair[1])
        return (
            f"| {self.framework} | {self.work_ms:g} ms | {self.bare_us:,.0f} us | {cost:,.1f} us"
            f" ({low:,.1f} to {high:,.1f}) | {ratio:.3f} ({ratio_low:.3f} to {ratio_high:.3f}) |"
        )


def _resampled(drawn: random.Random, values: list[list[float]]) -> list[float]:
    """Draw rounds, and blocks within each, with replacement."""
    rounds = drawn.choices(values, k=len(values))
    return [value for block in rounds for value in drawn.choices(block, k=len(block))]


def measure(
    frameworks: Sequence[str], works_ms: Sequence[float], num_rounds: int, num_blocks: int = 60
) -> list[StepCost]:
    """Measure frameworks in turn; longer steps get fewer blocks."""
    costs = [
        StepCost(framework=name, work_ms=work_ms, rounds=[])
        for work_ms in works_ms
        for name in frameworks
    ]
    for _ in range(num_rounds):
        for cost in costs:
            blocks = max(3, round(num_blocks / (1 + 2 * cost.work_ms)))
            options = ["--work-ms", str(cost.work_ms), "--blocks", str(blocks + _NUM_WARM)]
            pairs = _run_child(cost.framework, options)[_NUM_WARM:]
            cost.rounds.append([(round(ours, 2), round(bare, 2)) for ours, bare in pairs])
    return costs


def resident_megabytes(framework: str, num_steps: int, every: int) -> list[float]:
    """Return a process's resident memory after each `every` steps of training."""
    memory = ["--memory", str(num_steps), str(every)]
    sizes: list[float] = _run_child(framework, memory)
    return sizes


def _run_child(framework: str, options: list[str]) -> Any:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "DET_"))}
    done = subprocess.run(
        [sys.executable, str(_SELF), "--child", framework, *options],
        capture_output=True, text=True, env=kept | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _be_child(given: argparse.Namespace) -> Any:
    from peer_loops import PEER_LOOPS
    from step_blocks import paired_blocks, resident_megabytes
    from step_loops import num_products_of

    run = PEER_LOOPS[given.child]
    if given.memory:
        return resident_megabytes(run, *given.memory)
    return paired_blocks(run, given.blocks, num_products_of(given.work_ms / 1000))


def print_table(costs: Sequence[StepCost]) -> None:
    """Print all costs as a Markdown table."""
    print("| framework | work in a step | bare step | over bare (95 %) | ratio (95 %) |")
    print("|---|---|---|---|---|")
    for cost in costs:
        print(cost.row())


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="frameworks; bare and paceline by default")
    parser.add_argument("--quick", action="store_true", help="the null model only, in 30 s")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work-ms", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=60, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(_be_child(given)))
        return
    names = given.names or ["bare", "paceline"]
    works_ms = [0.0] if given.quick else [0.0, 1.0, 10.0]
    print_table(measure(names, works_ms, num_rounds=3 if given.quick else 5))


if __name__ == "__main__":
    main()
