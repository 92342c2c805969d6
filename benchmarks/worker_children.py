"""What the cases of `worker_cases.py` run in processes of their own; each prints JSON."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_EMPTY_RUNS = 20
# Parameters of 100 MB in single precision.
LARGE_WIDTH = 25_000_000 // 6
NUM_REPORTS = 5000
NUM_LOADER_ROUNDS = 20
SETTLE_S = 10.0
HEARTBEAT_S = 3.0


def starts() -> dict[str, Any]:
    """Two workers with their process group: cold, warm, and a second run of nothing."""
    from paceline import train

    def meet() -> None:
        from torch import distributed

        distributed.barrier()

    times: dict[str, Any] = {}
    for name in ("cold", "warm"):
        begin = time.perf_counter()
        with train.Trainer(num_workers=2) as trainer:
            trainer.run(meet)
            times[name] = time.perf_counter() - begin
            empty = []
            for _ in range(NUM_EMPTY_RUNS):
                begin = time.perf_counter()
                trainer.run(nothing)
                empty.append(time.perf_counter() - begin)
        times["empty"] = statistics.median(empty)
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    times["import torch"] = time.perf_counter() - begin
    return times


def nothing() -> None:
    """Do nothing."""


def reports() -> dict[str, Any]:
    """One `report()` of one worker, and the rate of eight."""
    from paceline import train

    def one() -> float:
        times = []
        for step in range(4 * NUM_REPORTS):
            begin = time.perf_counter_ns()
            train.report(loss=0.5, step=step)
            times.append(time.perf_counter_ns() - begin)
        return statistics.median(times) / 1000

    def many() -> tuple[float, float]:
        begin = time.time()
        for step in range(NUM_REPORTS):
            train.report(loss=0.5, step=step)
        return begin, time.time()

    with train.Trainer(num_workers=1) as trainer:
        median_us = trainer.run(one)[0]
    with train.Trainer(num_workers=8) as trainer:
        results = trainer.run(many)
        spans = list(results)
        num_seen = sum(len(results.metrics_of(rank)) for rank in range(8))
    assert num_seen == 8 * NUM_REPORTS
    elapsed = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return {"one_us": median_us, "rate": 8 * NUM_REPORTS / elapsed}


def losses() -> dict[str, Any]:
    """From a worker's SIGKILL to the user's code again, and from its SIGSTOP to being noticed."""
    from paceline import train

    struck = Path("struck").absolute()

    def die_once(config: dict[str, Any]) -> float:
        begun = time.time()
        if train.world_rank() == 1 and not struck.exists():
            struck.write_text(str(time.time()))
            os.kill(os.getpid(), config["signal"])
        if not struck.exists():
            time.sleep(600)
        return begun

    class Noticed(train.TrainingCallback):
        at = 0.0

        def handle_restart(self, error: Exception, generation: int) -> None:
            self.at = time.time()

    noticed = Noticed()
    times = {}
    with train.Trainer(num_workers=2, heartbeat_timeout_s=HEARTBEAT_S) as trainer:
        trainer.start()
        # Soon after its first workers the fork server loads, once, what optimizers import.
        time.sleep(SETTLE_S)
        for name, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            begun = trainer.run(die_once, {"signal": number}, callbacks=[noticed])
            times[name] = max(begun) - float(struck.read_text())
            times[f"{name}, noticed"] = noticed.at - float(struck.read_text())
            struck.unlink()
    return times


def creators() -> dict[str, Any]:
    """Empty passes of two warm workers, and from a SIGKILL to the end of the retried pass."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from paceline.creators import PyTorchTrainer

    x = torch.zeros(64, 4)
    data = TensorDataset(x, x[:, :1])
    times: dict[str, list[float]] = {}

    def model_of(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))

    def trainer_of(width: int) -> PyTorchTrainer:
        return PyTorchTrainer(
            lambda config: model_of(width),
            lambda config: DataLoader(data, batch_size=32),
            lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
            torch.nn.MSELoss,
            num_workers=2,
        )

    def measure(trainer: PyTorchTrainer, names: tuple[str, str]) -> None:
        trainer.train()
        for _ in range(NUM_EMPTY_RUNS):
            for name, max_retries in zip(names, (0, 3), strict=True):
                begin = time.perf_counter()
                trainer.train(num_steps=0, max_retries=max_retries)
                times.setdefault(name, []).append(time.perf_counter() - begin)

    with trainer_of(LARGE_WIDTH) as trainer:
        measure(trainer, ("large, empty", "large"))
    with trainer_of(1) as trainer:
        measure(trainer, ("empty", "kept"))
        os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
        begin = time.perf_counter()
        trainer.train()
        kill = time.perf_counter() - begin
    return {name: statistics.median(values) for name, values in times.items()} | {"kill": kill}


def first_batches() -> dict[str, Any]:
    """The first batch of a prepared loader and of a plain one, in turn."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from paceline import train

    def measure(config: dict[str, Any]) -> list[tuple[float, float]]:
        data = TensorDataset(torch.arange(1_000_000))
        options: Any = {"batch_size": 64, "shuffle": True, "num_workers": config["num_workers"]}
        pairs = []
        for _ in range(NUM_LOADER_ROUNDS + 1):
            begin = time.perf_counter()
            next(iter(DataLoader(data, **options)))
            middle = time.perf_counter()
            next(iter(train.prepare_data_loader(DataLoader(data, **options))))
            pairs.append((time.perf_counter() - middle, middle - begin))
        return pairs[1:]

    ratios = {}
    with train.Trainer(num_workers=1) as trainer:
        for num_workers in (0, 2):
            pairs = trainer.run(measure, {"num_workers": num_workers})[0]
            ours, plain = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratios[str(num_workers)] = [ours / plain, ours, plain]
    return ratios


def ray_train() -> dict[str, Any]:
    """The same starts, runs and losses with Ray Train."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    struck = Path("struck").absolute()

    def meet() -> None:
        from torch import distributed

        distributed.barrier()

    def die_once() -> None:
        from ray import train

        begun = time.time()
        # Ray Train gives up when a worker dies as it starts.
        time.sleep(0 if struck.exists() else 3)
        if train.get_context().get_world_rank() == 1 and not struck.exists():
            struck.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if not struck.exists():
            time.sleep(600)
        Path(f"begun-{train.get_context().get_world_rank()}").write_text(str(begun))

    def fit(function: Any, name: str) -> float:
        begin = time.perf_counter()
        TorchTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name=name, storage_path=os.getcwd(), failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()
        return time.perf_counter() - begin

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    directory = os.getcwd()

    def here(function: Any) -> Any:
        def run() -> None:
            os.chdir(directory)
            function()

        return run

    times = {"first": fit(here(meet), "first"), "second": fit(here(nothing), "second")}
    fit(here(die_once), "third")
    begun = max(float(path.read_text()) for path in Path().glob("begun-*"))
    times["kill"] = begun - float(struck.read_text())
    ray.shutdown()
    return times


TORCHRUN_SCRIPT = """
import os, sys, time
from torch import distributed
distributed.init_process_group("gloo")
distributed.barrier()
sys.stdout.flush()
os._exit(0)
"""


def main() -> None:
    """Run what is named, in an empty directory."""
    function = globals()[sys.argv[1]]
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        told = function()
        os.chdir("/")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
