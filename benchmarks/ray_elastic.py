"""Measure what an elastic group on Ray gets done while nodes come and go, and print a table.

Usage: python benchmarks/ray_elastic.py [--quick] [--json]. Needs Ray.

A Ray cluster on this machine has 2 to 4 nodes with room for one worker each. Every ten seconds one
is killed, one is added, or one is drained with five seconds' notice and then killed. The work is
the number of optimizer steps in that time. A fixed group of three on calm nodes, measured before,
gives the speed of a group of the mean size. A worker sleeps for each sample, so that the cores of
this machine are not measured. Each step must have the samples that it has in a fixed group.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paceline import train

NUM_SHARDS = 12
NUM_SAMPLES = 1200
SECONDS_PER_SAMPLE = 0.02
STEPS_PER_CHECKPOINT = 10
INTERVAL_S = 10.0
NOTICE_S = 5.0
# From three nodes to four, two and three again.
CHANGES = ("add", "kill", "kill", "add", "drain", "add")
_VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a-token-for-benchmarks-alone",
    # Whether Ray uses other addresses than that of the loopback interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def run_steps(config: dict[str, Any]) -> None:
    """Train until the driver has enough."""
    import torch
    from torch.utils.data import DataLoader

    # Each run draws its own order of samples otherwise.
    train.enable_reproducibility(0)
    model = train.prepare_model(torch.nn.Linear(1, 1))
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    data = [(torch.tensor([n / NUM_SAMPLES]), n) for n in range(NUM_SAMPLES)]
    loader = train.prepare_data_loader(DataLoader(data, 1, shuffle=True))  # type: ignore[arg-type]
    step = 0
    if state := train.load_checkpoint():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        for x, numbers in loader:
            time.sleep(config["pause_s"] * len(x))
            optimizer.zero_grad()
            train.backward(model(x).square().mean())
            optimizer.step()
            step += 1
            train.report(step=step, samples=numbers.tolist())
            if step % STEPS_PER_CHECKPOINT == 0:
                train.save_checkpoint(model=model, optimizer=optimizer, step=step)


class Over(Exception):
    """Ends a run from a callback."""


class Record(train.TrainingCallback):
    """What was trained in which step; ends the run after a time, or after a step."""

    def __init__(self, seconds: float = math.inf, num_steps: float = math.inf) -> None:
        self.samples: dict[tuple[int, int], list[int]] = {}
        self.sizes: list[int] = []
        self.num_restarts = 0
        self.began: float | None = None
        self.num_steps = 0
        self.seconds = 0.0
        self._seconds = seconds
        self._most = num_steps
        self.is_begun = threading.Event()
        self._is_over = False

    def handle_result(self, report: train.Report) -> None:
        """Take the samples of a rank."""
        now = time.monotonic()
        if self.began is None:
            self.began = now
            self.is_begun.set()
        self.samples.setdefault((report["step"], report.generation), []).extend(report["samples"])
        if report.rank == 0 and not self._is_over:
            self.num_steps = max(self.num_steps, report["step"])
        is_over = now - self.began >= self._seconds or self.num_steps > self._most
        if is_over and not self._is_over:
            self._is_over = True
            self.seconds = now - self.began
            raise Over

    def handle_restart(self, error: Exception, generation: int) -> None:
        """Count losses."""
        self.num_restarts += 1

    def handle_resize(self, num_workers: int, generation: int) -> None:
        """Note another number of workers."""
        self.sizes.append(num_workers)

    def whole_steps(self) -> dict[int, set[tuple[int, ...]]]:
        """Return the samples of each step in all generations of which all ranks were heard."""
        found: dict[int, set[tuple[int, ...]]] = {}
        for (step, _), samples in self.samples.items():
            if len(samples) == NUM_SHARDS:
                found.setdefault(step, set()).add(tuple(sorted(samples)))
        return found


class Nodes:
    """The nodes of a cluster that come and go.

    Args:
        cluster: Ray's local cluster.
        number: How many there are at first.
    """

    def __init__(self, cluster: Any, number: int) -> None:
        self._cluster = cluster
        self._nodes = [self._make() for _ in range(number)]
        self._counts: list[tuple[float, int]] = []
        self.done: list[str] = []

    def await_free(self) -> None:
        """Wait until Ray tells that nobody uses the nodes, which it does some seconds late."""
        import ray

        deadline = time.monotonic() + 60
        while ray.available_resources().get("seat", 0) < len(self._nodes):
            assert time.monotonic() < deadline, "Workers of a group that has ended use nodes."
            time.sleep(0.1)

    def flap(self, seconds: float) -> None:
        """Change one node after the other for a time."""
        began = time.monotonic()
        self._count()
        for number in range(1, int(seconds / INTERVAL_S)):
            change = CHANGES[(number - 1) % len(CHANGES)]
            due = began + number * INTERVAL_S
            time.sleep(max(0.0, due - time.monotonic()))
            if change == "add":
                self._nodes.append(self._make())
            else:
                self._lose(is_told=change == "drain")
            self._count()
            self.done.append(change)

    def mean(self, until: float) -> float:
        """Return the mean number of nodes from the first to a time."""
        ends = [*[when for when, _ in self._counts[1:]], until]
        spans = [
            max(0.0, end - when) * count
            for (when, count), end in zip(self._counts, ends, strict=True)
        ]
        return sum(spans) / (until - self._counts[0][0])

    def _count(self) -> None:
        self._counts.append((time.monotonic(), len(self._nodes)))

    def _make(self) -> Any:
        return self._cluster.add_node(num_cpus=1, resources={"seat": 1})

    def _lose(self, *, is_told: bool) -> None:
        node = self._nodes.pop(0)
        if is_told:
            drain(self._cluster.address, node.node_id)
            time.sleep(NOTICE_S)
        self._cluster.remove_node(node, allow_graceful=False)


def drain(address: str, node_id: str) -> None:
    """Tell Ray that a node will be lost soon."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(1000 * (time.time() + NOTICE_S))
    accepted, why = GcsClient(address=address).drain_node(node_id, reason, "spot", deadline_ms)
    assert accepted, why


def train_until_over(num_workers: Any, record: Record, pause_s: float, name: str) -> None:
    """Run a group until its record has enough."""
    with train.Trainer(
        num_workers=num_workers,
        max_retries=math.inf,
        cluster="ray",
        resources_per_worker={"seat": 1},
        elastic=train.ElasticConfig(num_shards=NUM_SHARDS),
        run_dir=name,
    ) as trainer:
        try:
            trainer.run(run_steps, {"pause_s": pause_s}, callbacks=[record])
        except Over:
            return


def measure(is_quick: bool) -> dict[str, Any]:
    """Return what both groups did."""
    seconds, calm_s = (60.0, 15.0) if is_quick else (180.0, 45.0)
    os.environ |= _VARIABLES
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    nodes = Nodes(cluster, 3)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    try:
        calm, record = Record(calm_s), Record(seconds)
        train_until_over(3, calm, SECONDS_PER_SAMPLE, "calm")
        # The mean number of nodes counts all of them from the first step on.
        nodes.await_free()
        with ThreadPoolExecutor(1) as executor:
            # Ray makes nodes in the main thread only.
            training = executor.submit(
                train_until_over, (1, 4), record, SECONDS_PER_SAMPLE, "elastic"
            )
            while not record.is_begun.wait(1.0):
                assert not training.done(), training.exception()
            nodes.flap(seconds)
            training.result()
        reference = Record(num_steps=record.num_steps + STEPS_PER_CHECKPOINT)
        train_until_over(2, reference, 0.0, "reference")
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert record.began is not None
    fixed, speed = calm.num_steps / calm.seconds, record.num_steps / record.seconds
    mean = nodes.mean(record.began + record.seconds)
    return {
        "seconds": record.seconds,
        "steps": record.num_steps,
        "mean nodes": mean,
        "steps/s": speed,
        "steps/s of a fixed group of three": fixed,
        "share": speed / (fixed * mean / 3),
        "losses": record.num_restarts,
        "sizes": record.sizes,
        "changes": dict(Counter(nodes.done)),
        **compare(record, reference),
    }


def compare(record: Record, reference: Record) -> dict[str, int]:
    """Compare the samples of each step with those of the reference."""
    found, expected = record.whole_steps(), reference.whole_steps()
    common = [step for step in range(1, record.num_steps) if step in found]
    return {
        "steps compared": len(common),
        "steps with other samples": sum(found[step] != expected.get(step) for step in common),
        "steps without all reports": record.num_steps - 1 - len(common),
    }


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="for one minute instead of three")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        told = measure(given.quick)
        os.chdir(Path(__file__).parent)
    if given.json:
        print(json.dumps(told))
        return
    print("| what | value |\n|---|---|")
    for name, value in told.items():
        print(f"| {name} | {value if not isinstance(value, float) else f'{value:.3g}'} |")
    # Without changes, or with nothing to compare, nothing was shown.
    is_shown = told["changes"] and told["steps compared"]
    sys.exit(not is_shown or told["share"] < 0.85 or told["steps with other samples"] > 0)


if __name__ == "__main__":
    main()
