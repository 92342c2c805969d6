"""Pools of real processes, with real faults."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from paceline._training.workers import worker_health
from paceline._training.workers.pickled_calls import NotSendableError
from paceline._training.workers.process_pools import LocalPool
from paceline._training.workers.processes.worker_output import OutputLine
from paceline._training.workers.worker_failures import RemoteTraceback, WorkerFailedError

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WaitUntil = Callable[[Callable[[], object]], None]
# Far longer than any test waits.
LONG_S = 600.0


def rank() -> int:
    return int(os.environ["RANK"])


@pytest.fixture
def printed() -> list[OutputLine]:
    """Collect what the workers of `pool` print."""
    return []


@pytest.fixture(params=["forked", "new"])
def pool(request: pytest.FixtureRequest, printed: list[OutputLine]) -> Iterator[LocalPool]:
    """Return a started pool of two workers."""
    with LocalPool(
        2, on_line=printed.append, grace_s=1.0, fork_server=request.param == "forked"
    ) as pool:
        yield pool


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_calls_return_values_in_rank_order_from_workers_that_stay(
    pool: LocalPool, printed: list[OutputLine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(first: int, *, second: int) -> tuple[int, int, str, str]:
        print("seen")
        return rank(), first + second, os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]

    pids = [process.pid for process in pool.processes]
    values = pool.submit(place, (1,), {"second": 2}).wait()
    assert values == [(0, 3, "2", "127.0.0.1"), (1, 3, "2", "127.0.0.1")]
    assert pool.submit(os.getpid).wait() == pids
    assert pool.submit(rank, ranks=[1]).wait() == [1]
    monkeypatch.chdir(tmp_path)
    assert pool.submit(os.getcwd).wait() == [str(tmp_path)] * 2
    monkeypatch.setattr(sys, "argv", ["driver.py", "--flag"])
    assert pool.submit(lambda: sys.argv, ranks=[0]).wait() == [["driver.py", "--flag"]]
    done, may_end = threading.Event(), tmp_path / "may end"

    def wait_and_return_much() -> bytes:
        while not may_end.exists():
            time.sleep(0.01)
        return bytes(40_000_000)

    call = pool.submit(wait_and_return_much)
    call.add_done_callback(lambda _: done.set())
    assert call.wait(0.0) is None
    may_end.touch()
    assert call.wait() == [bytes(40_000_000)] * 2
    assert call.is_done
    assert done.wait(60)
    pool.shutdown()
    assert living(pids) == []
    assert sorted((line.rank, line.text) for line in printed) == [(0, "seen"), (1, "seen")]


def test_what_was_submitted_waits_its_turn(pool: LocalPool) -> None:
    seen: list[int] = []

    def add(number: int) -> list[int]:
        sys.modules.setdefault("seen_numbers", seen)  # type: ignore[arg-type]
        numbers: list[int] = sys.modules["seen_numbers"]  # type: ignore[assignment]
        numbers.append(number)
        return list(numbers)

    calls = [pool.submit(add, (number,)) for number in range(20)]
    assert [call.wait() for call in calls][-1] == [list(range(20))] * 2


def test_an_error_keeps_its_type_and_the_pool_starts_again(pool: LocalPool, tmp_path: Path) -> None:
    has_next = tmp_path / "has_next"

    def fail() -> None:
        while rank() != 1 or not has_next.exists():
            time.sleep(0.01)
        raise ZeroDivisionError("by rank 1")

    pids = [process.pid for process in pool.processes]
    waiting = pool.submit(fail), pool.submit(rank)
    has_next.touch()
    for call in waiting:
        with pytest.raises(ZeroDivisionError, match=r"^by rank 1$") as info:
            call.wait()
        assert isinstance(info.value.__cause__, RemoteTraceback)
        assert "Rank 1 raised, the first of 2 to fail" in str(info.value.__cause__)
        assert "in fail\n" in str(info.value.__cause__)
    assert not pool.is_alive
    with pytest.raises(RuntimeError, match="must be started again after a failed call"):
        pool.submit(rank)
    pool.start()
    assert living(pids) == []
    assert pool.submit(rank).wait() == [0, 1]


def test_the_same_error_of_other_ranks_is_folded(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other one may be slow.
    monkeypatch.setattr(worker_health, "_SETTLE_S", 120.0)

    def fail() -> None:
        raise KeyError("everywhere")

    with pytest.raises(KeyError, match="everywhere") as info:
        pool.submit(fail).wait()
    first, _, rest = str(info.value.__cause__).partition("raised, the first of 2")
    other = 1 - int(first.split()[-1])
    assert rest.count("Traceback") == 1
    assert rest.endswith(f"Then rank {other} raised the same.")


def test_a_killed_worker_fails_the_call_and_survivors_end(pool: LocalPool) -> None:
    pids = [process.pid for process in pool.processes]
    call = pool.submit(time.sleep, (LONG_S,))
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerFailedError, match="Rank 1 was ended by SIGKILL") as info:
        call.wait()
    assert info.value.rank == 1
    with pytest.raises(WorkerFailedError, match="Rank 1 was ended by SIGKILL"):
        pool.submit(rank)
    pool.stop(grace_s=0.0)
    assert living(pids) == []


@pytest.mark.parametrize(
    ("leave", "text", "code"),
    [
        (lambda: os._exit(3), "Rank 1 exited with code 3", 3),
        (lambda: os._exit(0), "the process of rank 1 ended with exit code 0", 0),
        (lambda: sys.exit(0), "rank 1 left by `sys.exit(0)` with exit code 0", 0),
        (lambda: sys.exit(4), "rank 1 left by `sys.exit(4)` with exit code 4", 4),
        (lambda: sys.exit("no more"), "rank 1 left by `sys.exit('no more')` with exit code 1", 1),
    ],
)
def test_a_worker_that_leaves_fails_the_call(
    pool: LocalPool, leave: Callable[[], None], text: str, code: int | None
) -> None:
    with pytest.raises(WorkerFailedError, match=re.escape(text)) as info:
        pool.submit(leave, ranks=[1]).wait()
    assert (info.value.rank, info.value.exit_code) == (1, code)
    assert not pool.is_alive


def test_what_cannot_travel_is_named(pool: LocalPool) -> None:
    lock = threading.Lock()

    def returns_lock() -> Any:
        return {"model": threading.Lock()}

    with pytest.raises(NotSendableError, match=r"`args\[0\]` \(_thread\.lock\) is not"):
        pool.submit(print, (lock,))
    with pytest.raises(NotSendableError, match=r"`main -> lock` \(_thread\.lock\) is not"):
        pool.submit(lambda: lock)
    assert pool.submit(rank).wait() == [0, 1]
    with pytest.raises(NotSendableError, match=r"What rank \d returned .* `value\['model'\]`"):
        pool.submit(returns_lock).wait()


def test_an_error_that_cannot_travel_is_told(pool: LocalPool) -> None:
    def fail() -> None:
        class Odd(Exception):
            def __reduce__(self) -> str:
                raise TypeError("never")

        raise Odd("of a kind")

    with pytest.raises(Exception, match="of a kind") as info:
        pool.submit(fail, ranks=[0]).wait()
    assert "in fail\n" in str(info.value.__cause__)


@dataclasses.dataclass(frozen=True)
class Unchangeable(Exception):
    code: int


class LeavingWhilePickled(Exception):
    def __reduce__(self) -> Any:
        sys.exit(3)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("error", [Unchangeable(5), LeavingWhilePickled("x")])
def test_an_error_of_an_awkward_class_keeps_its_type_and_rank(
    error: Exception, failing: int
) -> None:
    kind, args = type(error), error.args

    def fail() -> None:
        if rank() == failing:
            raise kind(*args)
        time.sleep(LONG_S)

    with (
        LocalPool(3, on_line=lambda line: None, grace_s=0.0) as pool,
        pytest.raises(kind) as info,
    ):
        pool.submit(fail).wait()
    assert vars(info.value) == vars(error)
    assert f"Rank {failing} raised, the first of 3 to fail" in str(info.value.__cause__)


class Textless(RuntimeError):
    def __str__(self) -> str:
        raise LookupError("no text")


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_without_a_text_keeps_its_type_and_rank(failing: int) -> None:
    def fail() -> None:
        if rank() == failing:
            raise Textless
        time.sleep(LONG_S)

    with (
        LocalPool(3, on_line=lambda line: None, grace_s=0.0) as pool,
        pytest.raises(Textless) as info,
    ):
        pool.submit(fail).wait()
    assert f"Rank {failing} raised, the first of 3 to fail" in str(info.value.__cause__)
    assert "in fail\n" in str(info.value.__cause__)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_worker_that_leaves_by_an_object_without_a_text_is_named(failing: int) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise LookupError("no text")

    def leave() -> None:
        if rank() == failing:
            sys.exit(Odd())  # type: ignore[arg-type] # what a user may do
        time.sleep(LONG_S)

    with (
        LocalPool(3, on_line=lambda line: None, grace_s=0.0) as pool,
        pytest.raises(WorkerFailedError, match=r"left by `sys.exit\(<Odd>\)`") as info,
    ):
        pool.submit(leave).wait()
    assert (info.value.rank, info.value.exit_code) == (failing, 1)


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 2])
def test_a_process_that_a_killed_worker_has_started_is_ended(
    killed: int, tmp_path: Path, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_and_die() -> None:
        if rank() != killed:
            time.sleep(LONG_S)
        child = subprocess.Popen(
            ["sh", "-c", "trap '' TERM; echo > begun; exec sleep 600"], start_new_session=True
        )
        while not os.path.exists("begun"):
            time.sleep(0.01)
        Path("pid").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.chdir(tmp_path)
    with (
        LocalPool(3, on_line=lambda line: None, grace_s=0.0) as pool,
        pytest.raises(WorkerFailedError, match=f"Rank {killed} was ended by SIGKILL"),
    ):
        pool.submit(start_and_die).wait()
    wait_until(lambda: not living([int((tmp_path / "pid").read_text())]))


def test_an_interrupted_start_leaves_no_worker(tmp_path: Path, wait_until: WaitUntil) -> None:
    mark = f"PACELINE_TEST_MARK={tmp_path}".encode()

    def started() -> list[str]:
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def interrupt() -> None:
        wait_until(started)
        os.kill(os.getpid(), signal.SIGINT)

    environment = {"PACELINE_TEST_MARK": str(tmp_path)}
    with LocalPool(2, environment=environment, fork_server=False) as pool:
        pool.stop(grace_s=0.0)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            pool.start()
        thread.join()
        wait_until(lambda: not started())
        assert not pool.is_alive
        pool.start()
        assert pool.submit(rank).wait() == [0, 1]


def test_a_pool_that_is_stopped_answers_all_calls(pool: LocalPool) -> None:
    calls = [pool.submit(time.sleep, (LONG_S,)), pool.submit(rank)]
    pool.stop(grace_s=0.0)
    for call in calls:
        with pytest.raises(RuntimeError, match="must end before its pool is stopped"):
            call.wait()
    with pytest.raises(RuntimeError, match="must be started before calls are submitted"):
        pool.submit(rank)


def test_a_pool_is_started_again_with_another_number_of_workers(pool: LocalPool) -> None:
    def place() -> tuple[int, str]:
        return rank(), os.environ["WORLD_SIZE"]

    with pytest.raises(ValueError, match="`num_workers` must be at least 1, but got 0"):
        pool.start(0)
    pool.stop(grace_s=0.0)
    pool.start(3)
    assert pool.num_workers == 3
    assert pool.submit(place).wait() == [(0, "3"), (1, "3"), (2, "3")]
    pool.stop(grace_s=0.0)
    pool.start()
    assert len(pool.processes) == 3


def test_capacity_is_what_fits_on_this_machine_or_what_the_maker_says() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert LocalPool(2).capacity() == sys.maxsize
    assert LocalPool(2, threads_per_worker=1).capacity() == num_cores
    assert LocalPool(2, threads_per_worker=num_cores + 1).capacity() == 0
    slots = [4, 3]
    pool = LocalPool(2, threads_per_worker=1, capacity=slots.pop)
    assert (pool.capacity(), pool.capacity()) == (3, 4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_workers": 0}, "`num_workers` must be at least 1, but got 0"),
        ({"grace_s": -1.0}, "`grace_s` must be at least 0, but got -1.0"),
        ({"heartbeat_timeout_s": 0.0}, "`heartbeat_timeout_s` must be above 0, but got 0.0"),
        ({"threads_per_worker": 0}, "`threads_per_worker` must be at least 1, but got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LocalPool(**{"num_workers": 2, **settings})


@pytest.mark.parametrize("ranks", [[], [2], [-1, 0]])
def test_ranks_that_do_not_exist_are_refused(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="`ranks` must name workers from 0 to 1"):
        LocalPool(2).submit(rank, ranks=ranks)
