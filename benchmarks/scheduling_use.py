"""How much of the slots trials use that could: Paceline's rules beside Determined's scheduler."""

import random
from collections.abc import Iterator

from figures import Figure
from scheduling_simulation import Job, Rule, Simulation, determined, ours

from paceline._cluster.master.scheduling.pools import (
    NodeSlots,
    PolicyName,
    PoolSettings,
    Waiting,
)

_NUM_NODES, _NUM_SLOTS = 50, 8
# What a trial that makes room loses: it stores a checkpoint, and its processes start again.
_LEAVING_S = 20.0
_USERS = [f"user-{n}" for n in range(40)]

# Slots of trials with how often they come, mean seconds, and the load that they make in all.
_WORKLOADS: dict[str, tuple[dict[int, int], float, float]] = {
    "searches: 1 to 8 slots, short": ({1: 70, 2: 15, 4: 10, 8: 5}, 900.0, 1.5),
    "a lab: 1 to 32 slots": ({1: 50, 2: 15, 4: 12, 8: 15, 16: 6, 32: 2}, 3600.0, 1.5),
    "large groups among small trials": ({1: 80, 8: 14, 64: 4, 128: 2}, 3600.0, 1.5),
}


def workload(name: str, num_trials: int, seed: int = 1) -> list[Job]:
    """Return trials that come at random, with lengths of a log-normal distribution."""
    draw = random.Random(seed)
    shares, mean_s, load = _WORKLOADS[name]
    sizes = draw.choices(list(shares), list(shares.values()), k=num_trials)
    # Of a log-normal distribution with this sigma, the mean is e^(sigma^2 / 2) of the median.
    lengths = [mean_s / 1.65 * draw.lognormvariate(0.0, 1.0) for _ in sizes]
    work = sum(size * length for size, length in zip(sizes, lengths, strict=True))
    span_s = work / (_NUM_NODES * _NUM_SLOTS * load)
    times = sorted(draw.uniform(0, span_s) for _ in sizes)
    jobs = []
    for n, (at, size, length) in enumerate(zip(times, sizes, lengths, strict=True), 1):
        trial = Waiting(
            trial_id=n, experiment_id=n, num_slots=size, max_slots=None, queue_place=float(n),
            user=draw.choice(_USERS), priority=10 if draw.random() < 0.1 else 42,
        )  # fmt: skip
        jobs.append(Job(at, trial, length))
    return jobs


def rules() -> Iterator[tuple[str, Rule]]:
    """Yield the rules that are compared."""
    for policy in PolicyName:
        for backfill in (False, True):
            name = f"{policy.value}{' with backfill' * backfill}"
            yield name, ours(PoolSettings(policy=policy, backfill=backfill))
    yield "Determined, priority", determined()
    yield "Determined, priority with preemption", determined(preempts=True)


def use_of(rule: Rule, jobs: list[Job]) -> tuple[float, float, float, int]:
    """Return the share of slots used of those that could be, waits and the number of preemptions.

    Slots that could be used are all, or as many as running and waiting trials want if these are
    fewer. It is measured until the last trial has come. Waits are hours: the mean, and the longest
    one of trials with 32 slots or more, else of all.
    """
    nodes = [
        NodeSlots(node_id=n, slots=tuple(range(_NUM_SLOTS)), can_join=True)
        for n in range(1, _NUM_NODES + 1)
    ]
    simulation = Simulation(nodes=nodes, rule=rule, leaving_s=_LEAVING_S)
    simulation.add(jobs)
    last, total = jobs[-1].at, _NUM_NODES * _NUM_SLOTS
    used = could = before = 0.0
    running, wanted = 0, 0

    def look() -> None:
        nonlocal running, wanted
        held = simulation.running.values()
        running = sum(one.num_slots for one in held if not one.is_leaving)
        wanted = sum(one.num_slots for one in held)
        wanted += sum(one.num_slots for one in simulation.waiting.values())

    simulation.after = look
    for now in simulation.steps():
        seconds = max(min(now, last) - before, 0.0)
        used += running * seconds
        could += min(wanted, total) * seconds
        before = now
    waits = {job.trial: (simulation.began[job.trial.trial_id] - job.at) / 3600 for job in jobs}
    large = [wait for trial, wait in waits.items() if trial.num_slots >= 32] or [*waits.values()]
    mean = sum(waits.values()) / len(waits)
    return used / could, mean, max(large), simulation.num_preempted


def measure_use(num_trials: int = 900) -> list[Figure]:
    """Run each workload under each rule."""
    figures = []
    for name in _WORKLOADS:
        jobs = workload(name, num_trials)
        for what, rule in rules():
            share, mean, longest, number = use_of(rule, jobs)
            figures.append(
                Figure(
                    what=f"{name}, {what}: slots used of those that could be", unit="%",
                    values=[100 * share], bar=97 if "backfill" in what else None,
                    is_smaller_better=False,
                    beside=f"waits: {mean:.2f} h, longest of large ones {longest:.1f} h;"
                    f" {number} make room",
                )
            )  # fmt: skip
            print(figures[-1].what, f"{100 * share:.1f}", figures[-1].beside, flush=True)
    return figures
