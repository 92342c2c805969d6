"""Part of `gpu.py`: what a framework adds to a step of models of several sizes, in bf16.

Blocks of steps take turns with a bare loop's in one process, as in `step_cost.py`; both begin and
end when the GPU has done its work. A profiler tells what the host does besides: how many calls of
CUDA a step has over a bare one.
"""

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from figures import Figure
from gpu_machine import part_arguments
from gpu_record import Row, Status, check, emit, emit_figure, leave_out
from peer_loops import PEER_LOOPS
from step_blocks import body_of, paired_blocks
from step_loops import Model, Place, empty_directory
from step_models import LOADS, NULL, SMALL_LOADS, Load

DOORS = ("paceline", "train", "creators", "declarative")
PEERS = {"lightning": "pytorch_lightning", "accelerate": "accelerate", "ignite": "ignite"}
_BAR_US = 20.0
_NUM_WARM = 2
# What the imports before, and telling what there was no time for, may take.
_ENDING_S = 8.0
_NUM_BLOCKS = {"null": 40}
_NUM_HEAVY_BLOCKS = 4
# Calls of CUDA that the profiler names; the others are asked for by these.
_CALLS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "copies": ("cudaMemcpyAsync", "cudaMemsetAsync"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}


class Case(NamedTuple):
    """What one process measures: a framework with some models."""

    framework: str
    loads: tuple[str, ...]
    is_compiled: bool = False
    is_profiled: bool = False


def main() -> None:
    """Measure case by case, the most telling first, while there is time."""
    parser = part_arguments(__doc__)
    parser.add_argument("--child", metavar="FRAMEWORK")
    parser.add_argument("--loads", nargs="+", default=[])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--profiled", action="store_true")
    given = parser.parse_args()
    if given.child:
        run_case(given)
        return
    deadline = time.monotonic() + given.seconds - _ENDING_S
    for case in _cases(given.device):
        left_s = deadline - time.monotonic()
        if left_s < 5:
            leave_out(_title(case.framework, ", ".join(case.loads), case.is_compiled), "no time")
            continue
        _run_child(case, given.device, left_s)


def _cases(device: str) -> Iterator[Case]:
    null, *heavy = _loads(device)
    peers = [name for name, module in PEERS.items() if importlib.util.find_spec(module)]
    for name in sorted(PEERS.keys() - {*peers}):
        leave_out(f"{name}: one step", "it is not installed")
    if device == "cpu":
        yield Case("paceline", (null, *heavy))
        yield Case("paceline", (heavy[-1],), is_compiled=True)
        yield Case("paceline", (null,), is_profiled=True)
        return
    for framework in ("paceline", *peers, *DOORS[1:]):
        yield Case(framework, (null,))
    yield Case("paceline", (null,), is_profiled=True)
    for framework in ("paceline", *peers):
        yield Case(framework, tuple(heavy))
    yield Case("paceline", tuple(heavy), is_compiled=True)
    for door in DOORS[1:]:
        yield Case(door, (null,), is_profiled=True)
    for peer in peers:
        yield Case(peer, tuple(heavy), is_compiled=True)


def _loads(device: str) -> Mapping[str, Load]:
    return LOADS if device == "cuda" else SMALL_LOADS


def _run_child(case: Case, device: str, limit_s: float) -> None:
    command = [sys.executable, __file__, "--child", case.framework, "--device", device]
    command += ["--loads", *case.loads, "--seconds", str(limit_s)]
    command += ["--compiled"] * case.is_compiled + ["--profiled"] * case.is_profiled
    title = _title(case.framework, ", ".join(case.loads), case.is_compiled)
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        leave_out(title, "there was no time for all of it")
        return
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        check(title, False, why=f"exit code {done.returncode}: {last}")
        print(done.stderr, file=sys.stderr)


def _title(framework: str, load: str, is_compiled: bool) -> str:
    how = "compiled" if is_compiled else "eager"
    return f"{framework}: one step of {load}, {how}, bf16, over a bare loop"


# ---- in a process of its own -----------------------------------------------------------------


def run_case(given: argparse.Namespace) -> None:
    """Measure the models of a case, one after the other."""
    place = Place(device=given.device, precision="bf16")
    for name in given.loads:
        load = _loads(given.device)[name]
        if given.profiled:
            _tell_calls(given.child, load, place)
        else:
            _tell_cost(given.child, name, load, place, is_compiled=given.compiled)


def _tell_cost(framework: str, name: str, load: Load, place: Place, *, is_compiled: bool) -> None:
    num_blocks = _NUM_BLOCKS.get(name, _NUM_HEAVY_BLOCKS) if place.is_cuda else 3
    torch.manual_seed(0)
    run = PEER_LOOPS[framework]
    pairs = paired_blocks(
        run, num_blocks + _NUM_WARM, load=load, place=place, is_compiled=is_compiled
    )[_NUM_WARM:]
    bare_us = statistics.median(bare for _, bare in pairs)
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    emit_figure(
        Figure(
            what=_title(framework, name, is_compiled),
            unit="us",
            values=[ours - bare for ours, bare in pairs],
            bar=_BAR_US if framework in DOORS and load is NULL and place.is_cuda else None,
            beside=f"a bare step: {bare_us:,.0f} us; ratio {ratio:.3f}",
            raw=pairs,
        )
    )


def _tell_calls(framework: str, load: Load, place: Place) -> None:
    """Tell what a step calls, by the profiler, over a bare one."""
    ours = calls_in_a_step(framework, load, place)
    bare = calls_in_a_step("bare", load, place)
    told = [f"{name}: {ours[name]:.2f}, bare {bare[name]:.2f}" for name in sorted(ours)]
    emit(
        Row(
            what=f"{framework}: calls in a step, by the profiler",
            status=Status.TOLD,
            result=f"{ours['host us'] - bare['host us']:.1f} us of the host over a bare step",
            why="; ".join(told),
            raw={"ours": ours, "bare": bare},
        )
    )


def calls_in_a_step(framework: str, load: Load, place: Place) -> dict[str, float]:
    """Return how often a step calls CUDA or, without it, torch's operations; and the host's time.

    The profiler itself takes a good part of the time.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    num_blocks = 0

    def interlude(begin: int, end: int) -> None:
        nonlocal num_blocks
        num_blocks += 1
        if num_blocks == 1:
            profiler.start()
        elif num_blocks == 2:
            profiler.stop()

    body = body_of(load, place, is_compiled=False)
    model = Model(interlude=interlude, body=body, block=load.block)
    num_steps = 2 * load.block + 1
    with empty_directory():
        PEER_LOOPS[framework](model, load.loader(num_steps), num_steps, place)
    return _per_step(profiler.key_averages(), load.block, is_cuda=place.is_cuda)


def _per_step(averages: Any, num_steps: int, *, is_cuda: bool) -> dict[str, float]:
    counts: Counter[str] = Counter()
    kinds = {call: kind for kind, calls in _CALLS.items() for call in calls}
    host_us = 0.0
    for average in averages:
        host_us += average.self_cpu_time_total
        if not is_cuda and average.key.startswith("aten::"):
            counts["operations"] += average.count
        elif average.key in kinds:
            counts[kinds[average.key]] += average.count
    names = _CALLS if is_cuda else ("operations",)
    told = {name: counts[name] / num_steps for name in names}
    return {**told, "host us": host_us / num_steps}


if __name__ == "__main__":
    main()
