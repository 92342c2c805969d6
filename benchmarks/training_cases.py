"""The cases of `run.py` about training: steps and checkpoints."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import fsdp_steps
import rank_saves
import save_stall
import step_cost
from figures import Figure

_WORKS_MS = (0.0, 1.0, 10.0)
_NUM_ROUNDS = 4
# Megabytes of state, and how many of them are stored.
_SAVES = ((100, 21), (1000, 7))
_DOORS = ("paceline", "creators", "declarative")


def measure_steps() -> list[Figure]:
    """What Paceline adds to a step of 0, 1 and 10 ms of work, by each of its trainers."""
    return _step_figures(["bare", *_DOORS])


def measure_peers() -> list[Figure]:
    """The same for each peer; needs the environment of `make bench-peers`."""
    peers = ["ignite", "determined", "accelerate", "lightning"]
    return _step_figures(["bare", "paceline", *peers])


def _step_figures(frameworks: Sequence[str]) -> list[Figure]:
    costs = step_cost.measure(frameworks, _WORKS_MS, _NUM_ROUNDS)
    step_cost.print_table(costs)
    print()
    return [
        Figure(
            what=f"{cost.framework}: one step with {cost.work_ms:g} ms of work, over a bare loop",
            unit="us",
            values=[statistics.median(a - b for a, b in pairs) for pairs in cost.rounds],
            bar=20 if cost.framework in _DOORS and not cost.work_ms else None,
            beside=f"a bare step: {cost.bare_us:,.0f} us",
            raw=cost.rounds,
        )
        for cost in costs
    ]


def measure_step_memory() -> list[Figure]:
    """Resident memory of 100,000 steps, beside that of a bare loop."""
    num_steps, every = 100_000, 10_000
    bare = step_cost.resident_megabytes("bare", num_steps, every)
    ours = step_cost.resident_megabytes("paceline", num_steps, every)
    return [
        Figure(what="resident memory over a bare loop, after 100,000 steps", unit="MiB",
               values=[ours[-1] - bare[-1]], bar=40, beside=f"a bare loop: {bare[-1]:.0f} MiB",
               raw={"bare": bare, "paceline": ours}),
        Figure(what="growth from 50,000 to 100,000 steps", unit="MiB", values=[ours[-1] - ours[4]],
               bar=1, beside=f"a bare loop: {bare[-1] - bare[4]:.2f} MiB"),
    ]  # fmt: skip


def measure_saves() -> list[Figure]:
    """How long checkpoints of 100 MB and 1 GB stop training, in copies of the state.

    Training and the copy have the same number of torch's threads. With one, Paceline copies a half
    of a large state in a thread of its own.
    """
    figures = []
    for num_threads, (num_megabytes, num_rounds) in product((1, 2), _SAVES):
        times = save_stall.measure(num_megabytes, num_rounds, num_threads)
        save_stall.print_table(num_megabytes, num_threads, times)
        copy_s = save_stall.copy_seconds(times)
        others = ", ".join(
            f"{name}: {statistics.median(times[name][1:]) / copy_s:.1f}"
            for name in save_stall.WAYS[1:]
        )
        figures.append(
            Figure(what=f"stall of a checkpoint of {num_megabytes} MB, second save on,"
                        f" torch threads: {num_threads}",
                   unit="copies", values=[stall / copy_s for stall in times["paceline"][1:]],
                   bar=1.2, beside=f"{others}; one copy: {copy_s * 1000:.1f} ms", raw=times)
        )  # fmt: skip
    print()
    return figures


CASES: dict[str, Callable[[], list[Figure]]] = {
    "steps": measure_steps,
    "step-memory": measure_step_memory,
    "saves": measure_saves,
}
# Only by name: they need more than Paceline, or many minutes.
NAMED_CASES: dict[str, Callable[[], list[Figure]]] = {
    "fsdp-steps": fsdp_steps.measure_fsdp_steps,
    "peers": measure_peers,
    "rank-saves": rank_saves.measure_rank_saves,
    "rank-saves-s3": rank_saves.measure_rank_saves_s3,
    "rank-saves-1gb": partial(rank_saves.measure_rank_saves, 1000),
    "rank-saves-s3-1gb": partial(rank_saves.measure_rank_saves_s3, 1000),
}
