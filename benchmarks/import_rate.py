"""Rate of imports: metric values a second from each kind of store, with files forced to disk.

    python benchmarks/import_rate.py [--runs 100] [--keys 10] [--steps 1000]

Each store has the same runs; they are written first, which is not measured. TensorBoard's store
needs its library. One JSON object a line on stdout.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paceline.importers._import_runs import RunImport

_START_MS = 1_700_000_000_000


def write_mlflow(store: Path, number: int, num_keys: int, num_steps: int) -> None:
    """Write a run of MLflow's file store."""
    run = store / "1" / f"{number:032x}"
    (run / "metrics").mkdir(parents=True)
    (store / "1" / "meta.yaml").write_text("name: project\n")
    (run / "meta.yaml").write_text(f"run_name: run\nstart_time: {_START_MS}\nstatus: 3\n")
    for key in range(num_keys):
        lines = (f"{_START_MS + step} {step / (key + 3)!r} {step}\n" for step in range(num_steps))
        (run / "metrics" / f"metric_{key}").write_text("".join(lines))


def write_tensorboard(store: Path, number: int, num_keys: int, num_steps: int) -> None:
    """Write a log directory by TensorBoard's own writer."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(store / f"run-{number}"))
    for step in range(num_steps):
        for key in range(num_keys):
            writer.add_scalar(f"metric_{key}", step / (key + 3), step)
    writer.close()


WRITERS: dict[str, Callable[[Path, int, int, int], None]] = {
    "mlflow": write_mlflow,
    "tensorboard": write_tensorboard,
}


def measure(kind: str, num_runs: int, num_keys: int, num_steps: int) -> None:
    """Import a store twice, and print the rates: of new runs, and of known ones."""
    with tempfile.TemporaryDirectory() as directory:
        store, into = Path(directory, "store"), Path(directory, "runs")
        for number in range(num_runs):
            WRITERS[kind](store, number, num_keys, num_steps)
        for name in ("new", "unchanged"):
            before, before_cpu = time.perf_counter(), time.process_time()
            runs = list(RunImport(store, kind=kind, into=into))
            seconds = time.perf_counter() - before
            # On a machine with other work, the time on the CPU says more.
            cpu_seconds = time.process_time() - before_cpu
            assert {run.state for run in runs} == {name}, {run.state for run in runs}
            num_values = num_runs * num_keys * num_steps
            assert sum(run.num_points for run in runs) == num_values * (name == "new")
            answer = {"kind": kind, "runs": num_runs, "keys": num_keys, "steps": num_steps}
            answer |= {"state": name, "seconds": round(seconds, 2)}
            answer |= {"cpu_seconds": round(cpu_seconds, 2)}
            answer |= {"values_per_minute": round(num_values / seconds * 60)}
            answer |= {"values_per_cpu_minute": round(num_values / cpu_seconds * 60)}
            print(json.dumps(answer), flush=True)


def main() -> None:
    """Measure all kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("runs", 100), ("keys", 10), ("steps", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kind", choices=[*WRITERS], action="append")
    options = parser.parse_args()
    for kind in options.kind or WRITERS:
        measure(kind, options.runs, options.keys, options.steps)


if __name__ == "__main__":
    main()
