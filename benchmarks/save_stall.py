"""Measure how long a checkpoint stops training and how long it takes in all; print a table.

Usage: python benchmarks/save_stall.py [--megabytes N ...] [--rounds N] [--threads N]
    [--device cuda]

One process trains with Paceline and stores the same state in turn by Paceline, by `dcp.async_save`
and by `torch.save`. A stall is what a batch waits for: for Paceline the time from the end of one
`train_batch` to the begin of the next. It is compared with the time of `copy_` of one flat tensor
of the same size into memory that was used before, in the same process. "In all" is until the files
are on disk, while batches of 5 ms go on; what these lose to it is told too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SELF = Path(__file__)
_NUM_COPIES = 20
WAYS = ("paceline", "dcp.async_save, stager kept", "dcp.async_save", "torch.save")

Times = dict[str, list[float]]


def measure(
    num_megabytes: int,
    num_rounds: int,
    num_threads: int,
    *,
    device: str = "cpu",
    ways: Sequence[str] = WAYS,
    phase: int | None = None,
    once: Sequence[str] = (),
    timeout_s: float | None = None,
) -> Times:
    """Return seconds by name, one value a round; what was known when the time ran out.

    Args:
        num_megabytes: The size of the state.
        num_rounds: How often it is stored by each way; what is first has to get its memory first.
        num_threads: torch's threads.
        device: Where the state is.
        ways: The ways.
        phase: The batches of a way; what suits the size by default.
        once: The ways of the first round alone.
        timeout_s: How long it may take.
    """
    command = [sys.executable, str(_SELF), "--child", "--megabytes", str(num_megabytes)]
    command += ["--rounds", str(num_rounds), "--threads", str(num_threads)]
    command += ["--device", device, "--ways", *ways, "copy"]
    command += [] if phase is None else ["--phase", str(phase)]
    command += ["--once", *once]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment = kept | {"OMP_NUM_THREADS": str(num_threads)}
    with tempfile.TemporaryDirectory() as directory, Path(directory, "out").open("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.PIPE, text=True, env=environment,
            cwd=directory,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=timeout_s)
            assert not process.returncode, errors
            sys.stderr.write(errors)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        output.seek(0)
        lines = [line for line in output if line.endswith("}\n")]
    times: Times = json.loads(lines[-1]) if lines else {}
    return times


def copy_seconds(times: Times) -> float:
    """Return how long one copy takes, once all memory was used before."""
    return statistics.median(times["copy"][_NUM_COPIES:])


def print_table(num_megabytes: int, num_threads: int, times: Times) -> None:
    """Print the table of one size."""
    copy_s = copy_seconds(times)
    batch_s = statistics.median(times["batch"])
    print(f"\n{num_megabytes} MB, torch threads: {num_threads};", end=" ")
    print(f"copying them once: {copy_s * 1000:,.1f} ms; a batch: {batch_s * 1000:,.2f} ms\n")
    print("| way | stall | times the copy | in all | batches lose meanwhile |")
    print("|---|---|---|---|---|")
    for name in (way for way in WAYS if way in times):
        # What is first has to get its memory first.
        stalls, totals = times[name][1:], times[f"{name}, in all"][1:]
        stall = statistics.median(stalls)
        meanwhile = times.get(f"{name}, batch meanwhile", [])
        lost = sum(seconds - batch_s for seconds in meanwhile) / len(times[name])
        print(
            f"| {name} | {stall * 1000:,.1f} ms ({min(stalls) * 1000:,.1f} to"
            f" {max(stalls) * 1000:,.1f}) | {stall / copy_s:.2f} |"
            f" {statistics.median(totals):.2f} s | {lost * 1000:,.0f} ms |"
        )


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ways", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--phase", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--once", nargs="*", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _be_child(given)
        return
    for num_megabytes in given.megabytes:
        times = measure(num_megabytes, given.rounds, given.threads, device=given.device)
        print_table(num_megabytes, given.threads, times)


def _be_child(given: argparse.Namespace) -> None:
    from save_ways import Plan, store_by_all_ways
    from step_loops import Place

    plan = Plan(
        num_bytes=given.megabytes[0] * 1_000_000,
        num_rounds=given.rounds,
        num_threads=given.threads,
        place=Place(device=given.device),
        ways=given.ways,
        phase=given.phase,
        once=given.once,
    )
    print(json.dumps(store_by_all_ways(plan)))


if __name__ == "__main__":
    main()
