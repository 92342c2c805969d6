"""Data of the driver that workers use in shared memory."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from paceline._training.workers import shared_memory as _shared_memory_segment
from paceline._training.workers import write_watch as _write_watch
from paceline._training.workers.process_pools import LocalPool
from paceline._training.workers.worker_failures import WorkerFailedError

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

MEGA = 1 << 20
WaitUntil = Callable[[Callable[[], object]], None]


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    """Return three workers, which stay from test to test."""
    with LocalPool(3) as pool:
        yield pool


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers are replaced within a test."""


@pytest.fixture(autouse=True)
def alive(pool: LocalPool) -> None:
    """Replace the workers that a test has lost."""
    if not pool.is_alive:
        pool.start()


def segments(pid: int | str = "self") -> list[str]:
    """Return the open files of a process that are shared memory."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(f"{os.readlink(entry)} {entry.stat().st_ino}")
        except FileNotFoundError:
            continue
    return sorted({name for name in found if "memfd:paceline" in name})


def look(data: Any) -> tuple[int, list[str]]:
    """Return what a worker sees, and the shared memory that it uses."""
    return total(data), segments()


def total(data: torch.Tensor) -> int:
    """Return a sum that depends on no order."""
    return int(data.long().sum())


def num_copied_bytes() -> int:
    """Return how much of the shared memory this process has copied."""
    num_bytes, is_shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            is_shared = "memfd:paceline" in line
        elif is_shared and line.startswith("Anonymous:"):
            num_bytes += 1024 * int(line.split()[1])
    return num_bytes


def test_data_lie_in_memory_once_and_stay_for_the_next_call(pool: LocalPool) -> None:
    data = torch.arange(5 * MEGA, dtype=torch.float32)
    first = pool.submit(look, (data,)).wait() or []
    assert first == [(total(data), first[0][1])] * 3
    assert len(first[0][1]) == 1
    assert pool.submit(look, (data,), ranks=[0, 2]).wait() == first[:2]

    # A changed byte is seen, whoever has written it; what did not change stays.
    array = data.numpy()
    array[3000] = -1
    other = np.full(20 * MEGA, 2, np.uint8)
    second = pool.submit(lambda data, other: (*look(data), int(other[-1])), (data, other)).wait()
    assert second is not None
    assert [value for value, *_ in second] == [total(data)] * 3
    assert len(second[0][1]) == 2
    assert not set(second[0][1]) & set(first[0][1])
    data[-1000] = 7
    third = pool.submit(lambda data, other: (*look(data), int(other[-1])), (data, other)).wait()
    assert third is not None
    assert third[0][0] == total(data)
    assert len(set(third[0][1]) & set(second[0][1])) == 1

    # Memory is given back with the data.
    del data, array
    gc.collect()
    assert len(segments()) == 1
    pool.stop(10.0)
    assert segments() == []
    assert int(other[0]) == 2


@pytest.mark.parametrize("has_marks", [True, False])
def test_no_write_of_the_driver_is_missed(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch, has_marks: bool
) -> None:
    """Writers are programs and the system; two buffers have some memory in common."""
    if not has_marks:
        monkeypatch.setattr(_write_watch, "_tracker", lambda: None)
    array = np.zeros(36 * MEGA + 5, np.uint8)
    part = array[MEGA + 3 :]

    def read_into(place: int) -> None:
        with open("/dev/urandom", "rb", buffering=0) as file:
            file.readinto(memoryview(array)[place : place + 8])

    def use(array: Any, part: Any, place: int) -> Any:
        near = slice(max(0, place - 8), place + 8)
        shift = len(array) - len(part)
        return array[near].tolist(), part[max(0, place - shift) :][:8].tolist()

    for place in (0, 1, 20 * MEGA, MEGA + 3, len(array) - 9, len(array) - 1):
        for write in (lambda place: array.__setitem__(place, array[place] ^ 1), read_into):
            write(place)
            results = pool.submit(use, (array, part, place), ranks=[0, 2]).wait()
            assert results == [use(array, part, place)] * 2
    assert len(segments()) == 2


def test_workers_may_write_and_use_what_arrives_as_it_was(pool: LocalPool) -> None:
    base = torch.arange(2 * MEGA, dtype=torch.float32)
    frozen = np.arange(MEGA)
    frozen.flags.writeable = False
    fortran = np.asfortranarray(np.arange(2 * MEGA, dtype=np.int64).reshape(4, -1))
    model = nn.Linear(512, 1024, bias=False)
    small = [torch.full((1500,), float(number)) for number in range(300)]
    data = {
        "base": base,
        "view": base[10:20],
        "frozen": frozen,
        "fortran": fortran,
        "strided": fortran[:, ::2],
        "model": model,
        "small": small,
        "half": base[:MEGA].to(torch.bfloat16),
        "text": "x" * 2 * MEGA,
    }

    def write(data: dict[str, Any]) -> Any:
        last = float(data["base"].max())
        copied = [num_copied_bytes()]
        data["base"][:] = -1
        copied.append(num_copied_bytes())
        seen = data["view"].tolist()
        data["fortran"][0, 0] = 5
        data["model"].weight.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="read-only"):
            data["frozen"][0] = 1
        rest = [float(each.sum()) for each in data["small"]]
        half = data["half"]
        return last, copied, seen, rest, half.dtype, len(data["text"])

    results = pool.submit(write, (data,)).wait() or []
    for last, copied, seen, rest, dtype, length in results:
        assert last == 2 * MEGA - 1
        assert copied[0] == 0
        assert copied[1] >= 8 * MEGA
        # Two tensors with the same memory have the same memory.
        assert seen == [-1.0] * 10
        assert rest == [1500.0 * number for number in range(300)]
        assert (dtype, length) == (torch.bfloat16, 2 * MEGA)
    assert len(results) == 3
    assert base[-1] == 2 * MEGA - 1
    assert fortran[0, 0] == 0
    assert model.weight.untyped_storage().nbytes() == 4 * 512 * 1024

    names = ("strided", "model", "base")
    same = pool.submit(lambda data: [data[name] for name in names], (data,), ranks=[1]).wait()
    assert same is not None
    assert all(each.untyped_storage().resizable() for each in (same[0][1].weight, same[0][2]))
    assert np.array_equal(same[0][0], fortran[:, ::2])
    assert torch.equal(same[0][1].weight, model.weight)


@pytest.mark.slow
def test_tables_travel_without_copies(pool: LocalPool) -> None:
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"a": np.arange(MEGA), "b": np.linspace(0, 1, MEGA)})
    table = arrow.table({"a": np.arange(MEGA)})

    def use(frame: Any, table: Any) -> Any:
        frame["a"] += 1
        return int(frame["a"].sum()), table.column("a")[-1].as_py(), len(segments())

    results = pool.submit(use, (frame, table)).wait()
    expected = MEGA * (MEGA - 1) // 2
    assert results == [(expected + MEGA, MEGA - 1, 1)] * 3
    assert int(frame["a"].sum()) == expected


@pytest.mark.parametrize("victim", [0, 2])
def test_workers_that_replace_a_killed_one_use_the_same_memory(
    pool: LocalPool, victim: int
) -> None:
    data = torch.ones(3 * MEGA)

    def die(data: torch.Tensor, victim: int) -> int:
        if os.environ["RANK"] == str(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        return total(data)

    before = pool.submit(look, (data,)).wait() or []
    with pytest.raises(WorkerFailedError, match=f"Rank {victim}"):
        pool.submit(die, (data, victim)).wait()
    pool.await_end()
    pool.start()
    assert pool.submit(look, (data,)).wait() == before


def test_workers_that_do_not_reach_the_memory_are_sent_the_data(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared_memory_segment, "_machine", lambda: "another machine")
    data = torch.arange(3 * MEGA, dtype=torch.float32)
    large = np.full(17 * MEGA, 3, np.uint8)

    def use(data: torch.Tensor, large: Any) -> Any:
        data[0] = 5
        return total(data[1:]), int(large[-1]), len(segments())

    calls = [pool.submit(use, (data, large)) for _ in range(2)]
    for call in calls:
        assert call.wait() == [(total(data[1:]), 3, 0)] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_directories_are_passed_over(
    pool: LocalPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", full], check=False)
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted")
    try:
        monkeypatch.setenv("PACELINE_SHARED_DIR", str(full))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        data = torch.arange(3 * MEGA, dtype=torch.float32)

        def use(data: torch.Tensor) -> Any:
            maps = Path("/proc/self/maps").read_text()
            return total(data), [line for line in maps.splitlines() if "deleted" in line]

        results = pool.submit(use, (data,)).wait() or []
        for value, maps in results:
            assert value == total(data)
            assert any(str(tmp_path) in line and str(full) not in line for line in maps)
        # No place at all: in the frame of the call.
        monkeypatch.setattr("tempfile.tempdir", str(full))
        data += 1
        results = pool.submit(use, (data,)).wait() or []
        assert [value for value, _ in results] == [total(data)] * 3
        assert list(full.iterdir()) == []
    finally:
        pool.stop(10.0)
        subprocess.run(["umount", full], check=True)


DRIVER = """
    import os, sys, time, torch
    from paceline._training.workers.process_pools import LocalPool

    def hold(data, mark):
        open(f"{mark}-{os.environ['RANK']}", "w").write(str(os.getpid()))
        time.sleep(600)
        return float(data.sum())

    with LocalPool(3) as pool:
        pool.submit(hold, (torch.ones(8 << 20), sys.argv[1])).wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("directory", ["", "shared"])
def test_nothing_is_left_of_a_killed_driver(
    tmp_path: Path, wait_until: WaitUntil, directory: str
) -> None:
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    environment = dict(os.environ)
    if directory:
        (tmp_path / directory).mkdir()
        environment["PACELINE_SHARED_DIR"] = str(tmp_path / directory)
    before = set(os.listdir("/dev/shm"))
    driver = subprocess.Popen([sys.executable, "driver.py", "mark"], cwd=tmp_path, env=environment)
    marks = [tmp_path / f"mark-{rank}" for rank in range(3)]
    wait_until(lambda: all(mark.exists() and mark.read_text() for mark in marks))
    pids = [int(mark.read_text()) for mark in marks]
    if not directory:
        assert len(segments(driver.pid)) == 1
        assert [len(segments(pid)) for pid in pids] == [1, 1, 1]
    driver.kill()
    driver.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert set(os.listdir("/dev/shm")) <= before
    assert not directory or os.listdir(tmp_path / directory) == []


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_new_interpreter_keeps_nothing_of_its_first_call(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """It loads torch for that call, and torch keeps errors of its own imports with their frames."""
    monkeypatch.setenv("PACELINE_WARM", "0")
    if not is_shared:
        monkeypatch.setattr(_shared_memory_segment, "_machine", lambda: "another machine")

    def kept() -> tuple[int, list[str]]:
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
        return max((tensor.numel() for tensor in tensors), default=0), segments()

    with LocalPool(1) as pool:
        data = torch.ones(3 * MEGA)
        assert pool.submit(total, (data,)).wait() == [3 * MEGA]
        assert pool.submit(kept).wait() == [(0, [])]
