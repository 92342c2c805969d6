"""Part of `gpu.py`: what checkpoints of large states cost, beside other ways to store them.

The state is on the device. A stall is what the next batch waits for, until the device has copied
the state; the limit is the time of copying as many bytes to pinned memory. Each file is deleted
before the next one is written, and the largest state is stored by Paceline alone.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import save_stall
import torch
from figures import Figure
from gpu_machine import copy_bytes_per_s, part_arguments
from gpu_record import check, emit_figure, leave_out, tell
from memory_peak import MemoryPeak
from save_stall import WAYS, Times
from step_loops import Place, empty_directory

_BAR = 1.2
# Megabytes of state, rounds, and the ways.
_SIZES: dict[str, Sequence[tuple[int, int, Sequence[str]]]] = {
    "cuda": (
        (1_000, 3, WAYS),
        (10_000, 2, ("paceline", "torch.save")),
    ),
    "cpu": ((20, 2, WAYS), (40, 2, ("paceline", "torch.save"))),
}
_PHASES = {"cuda": 60, "cpu": 8}
_LARGE_MB = {"cuda": 40_000, "cpu": 16}
_NUM_TENSORS = 40
# What is left free on the disk and in memory beside a state.
_SPARE = 1.1


def main() -> None:
    """Measure all sizes."""
    parser = part_arguments(__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--size", type=int, help="this size alone, counted from 0")
    given = parser.parse_args()
    if given.large:
        measure_large(given.device, given.seconds)
        return
    deadline = time.monotonic() + given.seconds - 1
    sizes = _SIZES[given.device]
    chosen = sizes if given.size is None else sizes[given.size :][:1]
    for num_megabytes, num_rounds, ways in chosen:
        lacking = _lacking_room(num_megabytes * 10**6)
        if lacking:
            leave_out(f"a checkpoint of {_size(num_megabytes)}", lacking)
            continue
        times = save_stall.measure(
            num_megabytes,
            num_rounds,
            1,
            device=given.device,
            ways=ways,
            phase=_PHASES[given.device],
            # The slowest is the same each time.
            once=("torch.save",),
            timeout_s=deadline - time.monotonic(),
        )
        tell_size(num_megabytes, ways, times, Place(device=given.device))


def _size(num_megabytes: int) -> str:
    return f"{num_megabytes / 1000:g} GB" if num_megabytes >= 1000 else f"{num_megabytes} MB"


def _bar_ms(limit_s: float, place: Place) -> float | None:
    # States so small that a rehearsal stores say nothing of large ones.
    return _BAR * limit_s * 1000 if place.is_cuda else None


def _lacking_room(num_bytes: int) -> str:
    """Return what there is too little of to store a state, or nothing."""
    wanted = num_bytes * _SPARE
    free = shutil.disk_usage(tempfile.gettempdir()).free
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if free < wanted:
        return f"{free / 1e9:.0f} GB of the disk are free"
    return f"{available / 1e9:.0f} GB of memory are free" if available < wanted else ""


# ---- beside other ways -----------------------------------------------------------------------


def tell_size(num_megabytes: int, ways: Sequence[str], times: Times, place: Place) -> None:
    """Tell the figures of one size, as far as they are known."""
    title = f"a checkpoint of {_size(num_megabytes)}"
    if len(times.get("paceline", ())) < 2 or "copy" not in times:
        check(f"{title}: stall", False, why="the time ran out before the second save")
        return
    copy_s = save_stall.copy_seconds(times) if len(times["copy"]) > 20 else times["copy"][-1]
    rate = times["bytes"][0] / copy_s / 1e9
    emit_figure(
        Figure(
            what=f"{title}: stall, second save on",
            unit="ms",
            values=[stall * 1000 for stall in times["paceline"][1:]],
            bar=_bar_ms(copy_s, place),
            beside=f"the copy alone: {copy_s * 1000:.1f} ms, {rate:.1f} GB/s; "
            + _beside(ways, times, "", 1000, "ms"),
            raw=times,
        )
    )
    first_ms = times["paceline"][0] * 1000
    tell(f"{title}: stall, first save", f"{first_ms:,.0f} ms", "it gets its memory as well")
    _tell_others(f"{title}: until it is on the disk", ways, times, ", in all", "s", 1)
    for where in ("host", "device"):
        what = f"{title}: more {where} memory, first save"
        _tell_others(what, ways, times, f", {where} bytes", "MB", 1e-6)


def _tell_others(
    what: str, ways: Sequence[str], times: Times, kind: str, unit: str, factor: float
) -> None:
    values = _chosen(times, "paceline", kind)
    if values:
        scaled = [value * factor for value in values]
        beside = _beside(ways, times, kind, factor, unit)
        emit_figure(Figure(what=what, unit=unit, values=scaled, bar=None, beside=beside))


def _chosen(times: Times, way: str, kind: str) -> list[float]:
    """Return the values that count: memory is got by the first save, times are of later ones."""
    values = times.get(f"{way}{kind}", [])
    return values[:1] if "bytes" in kind else values[1:] or values


def _beside(ways: Sequence[str], times: Times, kind: str, factor: float, unit: str) -> str:
    told = []
    for way in ways[1:]:
        values = _chosen(times, way, kind)
        if values:
            told.append(f"{way}: {statistics.median(values) * factor:,.1f} {unit}")
    return "; ".join(told)


# ---- Paceline alone --------------------------------------------------------------------------


def measure_large(device: str, seconds: float) -> None:
    """Copy the largest state three times, and store it once if there is time."""
    deadline = time.monotonic() + seconds
    num_megabytes = _LARGE_MB[device]
    title = f"a checkpoint of {_size(num_megabytes)}, alone"
    lacking = _lacking_room(num_megabytes * 10**6)
    if lacking:
        leave_out(title, lacking)
        return
    place = Place(device=device)
    with empty_directory():
        _measure_alone(title, num_megabytes * 10**6, place, deadline)


def _measure_alone(title: str, num_bytes: int, place: Place, deadline: float) -> None:
    from paceline import core
    from paceline._training.engine.checkpoints.checkpoint_saver import CheckpointSaver

    size = num_bytes // _NUM_TENSORS // 4
    tensors = {f"tensor_{i}": torch.ones(size, device=place.device) for i in range(_NUM_TENSORS)}
    parts: dict[str, Any] = {"state": tensors}
    peak = MemoryPeak(place)
    rate = _rate(tensors["tensor_0"], place)
    limit_s = num_bytes / rate
    with core.init(name="bench") as context:
        saver = CheckpointSaver()
        peak.start()
        stalls = [_seconds_of_copy(saver, parts, place) for _ in range(3)]
        rises = peak.stop()
        emit_figure(
            Figure(
                what=f"{title}: stall, second save on",
                unit="ms",
                values=[stall * 1000 for stall in stalls[1:]],
                bar=_bar_ms(limit_s, place),
                beside=f"the copy alone: {limit_s * 1000:.0f} ms, {rate / 1e9:.1f} GB/s; first"
                f" save: {stalls[0]:.1f} s; more memory: "
                + ", ".join(f"{where} {risen / 1e6:,.0f} MB" for where, risen in rises.items()),
                raw={"stalls": stalls, "rises": rises},
            )
        )
        left_s = deadline - time.monotonic()
        begin = time.monotonic()
        saver.save(parts, context.checkpoint.store_path({"steps_completed": 1}))
        saver.finish()
        seconds = time.monotonic() - begin
        emit_figure(
            Figure(
                what=f"{title}: until it is on the disk",
                unit="s",
                values=[seconds],
                bar=None,
                beside=f"{num_bytes / seconds / 1e9:.2f} GB/s; {left_s:.0f} s were left for it",
            )
        )


def _seconds_of_copy(saver: Any, parts: dict[str, Any], place: Place) -> float:
    place.synchronize()
    begin = time.perf_counter()
    saver._copies.copy(parts)
    place.synchronize()
    return time.perf_counter() - begin


def _rate(tensor: torch.Tensor, place: Place) -> float:
    """Return the bytes a second of copying to pinned memory, which is freed again."""
    target = torch.ones(tensor.shape, pin_memory=place.is_cuda)
    return statistics.median(copy_bytes_per_s(tensor, target))


if __name__ == "__main__":
    main()
