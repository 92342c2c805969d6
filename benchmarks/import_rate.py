"""Rate of imports: metric values a second from each kind of store, with files forced to disk.

    python benchmarks/import_rate.py [--runs 100] [--keys 10] [--steps 1000]

Each store has the same runs; they are written first, which is not measured. TensorBoard's store
needs its library. The figures are kept in `benchmarks/results/`.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import Figure, print_table, store

from paceline.importers._export_files import RunImport

_START_MS = 1_700_000_000_000
_BAR = 1_000_000


def write_mlflow(place: Path, number: int, num_keys: int, num_steps: int) -> None:
    """Write a run of MLflow's file store."""
    run = place / "1" / f"{number:032x}"
    (run / "metrics").mkdir(parents=True)
    (place / "1" / "meta.yaml").write_text("name: project\n")
    (run / "meta.yaml").write_text(f"run_name: run\nstart_time: {_START_MS}\nstatus: 3\n")
    for key in range(num_keys):
        lines = (f"{_START_MS + step} {step / (key + 3)!r} {step}\n" for step in range(num_steps))
        (run / "metrics" / f"metric_{key}").write_text("".join(lines))


def write_tensorboard(place: Path, number: int, num_keys: int, num_steps: int) -> None:
    """Write a log directory by TensorBoard's own writer."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(place / f"run-{number}"))
    for step in range(num_steps):
        for key in range(num_keys):
            writer.add_scalar(f"metric_{key}", step / (key + 3), step)
    writer.close()


WRITERS: dict[str, Callable[[Path, int, int, int], None]] = {
    "mlflow": write_mlflow,
    "tensorboard": write_tensorboard,
}


def measure(kind: str, num_runs: int, num_keys: int, num_steps: int) -> list[Figure]:
    """Import a store twice: the rates of new runs, and of known ones."""
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        place, into = Path(directory, "store"), Path(directory, "runs")
        for number in range(num_runs):
            WRITERS[kind](place, number, num_keys, num_steps)
        for name in ("new", "unchanged"):
            before, before_cpu = time.perf_counter(), time.process_time()
            runs = list(RunImport(place, kind=kind, into=into))
            seconds = time.perf_counter() - before
            # On a machine with other work, the time on the CPU says more.
            cpu_seconds = time.process_time() - before_cpu
            assert {run.state for run in runs} == {name}, {run.state for run in runs}
            num_values = num_runs * num_keys * num_steps
            assert sum(run.num_points for run in runs) == num_values * (name == "new")
            figures.append(
                Figure(
                    what=f"import of {num_runs:,} {name} runs of {kind}, {num_keys} keys,"
                    f" {num_steps:,} points each", unit="values/minute",
                    values=[num_values / seconds * 60], is_smaller_better=False,
                    bar=_BAR if name == "new" else None,
                    beside=f"{seconds:.1f} s, {cpu_seconds:.1f} s of processor time:"
                    f" {num_values / cpu_seconds * 60:,.0f} values in a minute of that",
                )
            )  # fmt: skip
    return figures


def main() -> None:
    """Measure all kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("runs", 100), ("keys", 10), ("steps", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kind", choices=[*WRITERS], action="append")
    options = parser.parse_args()
    figures = [
        figure
        for kind in options.kind or WRITERS
        for figure in measure(kind, options.runs, options.keys, options.steps)
    ]
    print_table(figures)
    store(figures)


if __name__ == "__main__":
    main()
