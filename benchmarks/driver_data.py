"""Data of the driver on their way to two workers: time and memory, at the first run and the next.

Usage: python benchmarks/driver_data.py [MEGABYTES], or the case `driver-data` of `run.py`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import Figure

_NUM_ROUNDS = 3
_MEGABYTES = 1000
_MB = 1000 * 1000


def measure_driver_data() -> list[Figure]:
    """1 GB of tensors for two warm workers, beside one copy of it as torch shares it."""
    rounds = [_run_child() for _ in range(_NUM_ROUNDS)]
    copy_s = statistics.median(r["copy"] for r in rounds)
    read_s = statistics.median(r["compare"] for r in rounds)
    return [
        Figure(what="1 GB from the driver to two workers, first run", unit="s",
               values=[r["first"] for r in rounds], bar=1.5, raw=rounds,
               beside=f"one copy by torch's `share_memory_`: {copy_s:.2f} s"),
        Figure(what="processor time of the driver and the workers in the first run", unit="s",
               values=[r["first, processor"] for r in rounds], bar=None),
        Figure(what="the next run of the same trainer", unit="s",
               values=[r["next"] for r in rounds], bar=0.1,
               beside=f"`torch.equal` of 1 GB: {read_s:.2f} s"),
        Figure(what="a run after one number of the data has changed", unit="s",
               values=[r["changed"] for r in rounds], bar=1.5),
        Figure(what="a run whose workers read all of it", unit="s",
               values=[r["read"] for r in rounds], bar=None),
        Figure(what="memory that the machine needs besides the driver's, of the data", unit="times",
               values=[r["memory"] for r in rounds], bar=1.1),
    ]  # fmt: skip


def _run_child() -> Any:
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), str(_MEGABYTES)],
            cwd=directory, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def memory_bytes(pids: list[int]) -> int:
    """Return the memory of processes, shared pages counted once."""
    num_bytes = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                num_bytes += 1024 * int(line.split()[1])
    return num_bytes


def processor_s(pids: list[int]) -> float:
    """Return the processor time of processes."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    ticks = sum(int(each[11]) + int(each[12]) for each in fields)
    return ticks / os.sysconf("SC_CLK_TCK")


def touch(config: dict[str, Any]) -> tuple[int, float]:
    """Look at the data, or read all of them."""
    from paceline import train

    dataset = train.get_dataset()
    numbers = dataset[0][0] if config["rows"] == 1 else dataset.source.data.tensors[0]
    return os.getpid(), float(numbers.sum())


def main() -> None:
    """Print the seconds of each kind of run, and the memory."""
    import torch
    from torch.utils.data import TensorDataset

    from paceline import train

    num_bytes = int(sys.argv[1] if len(sys.argv) > 1 else _MEGABYTES) * _MB
    x = torch.ones(num_bytes // 4000, 1000)
    data = TensorDataset(x)
    seconds = {}
    with train.Trainer(num_workers=2, cpus_per_worker=1) as trainer:
        pids = [pid for pid, _ in trainer.run(touch, {"rows": 0}, dataset=TensorDataset(x[:1] * 1))]
        pids.append(os.getpid())
        before = memory_bytes(pids)
        for name, rows in (("first", 1), ("next", 1), ("changed", 1), ("read", 0)):
            if name == "changed":
                x[-1, -1] = 2
            begin, used_s = time.perf_counter(), processor_s(pids)
            results = trainer.run(touch, {"rows": rows}, dataset=data)
            seconds[name] = time.perf_counter() - begin
            seconds[f"{name}, processor"] = processor_s(pids) - used_s
            expected = float(x.sum()) if rows == 0 else float(x[0].sum())
            assert [value for _, value in results] == [expected] * 2, name
        seconds["memory"] = (memory_bytes(pids) - before) / num_bytes
    same = x.clone()
    begin = time.perf_counter()
    assert torch.equal(x, same)
    seconds["compare"] = time.perf_counter() - begin
    begin = time.perf_counter()
    same.share_memory_()  # type: ignore[no-untyped-call] # torch's
    seconds["copy"] = time.perf_counter() - begin
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
