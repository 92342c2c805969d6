"""Workers that hang, or wait for others in vain, in real process groups."""

import ctypes
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest

from paceline._base.exceptions import CollectiveMismatchError
from paceline._training.workers import stuck_ranks
from paceline._training.workers import worker_generation as _generation
from paceline._training.workers.process_pools import LocalPool
from paceline._training.workers.processes.templates import stop_templates
from paceline._training.workers.processes.worker_output import OutputLine
from paceline._training.workers.worker_failures import WorkerFailedError

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LONG_S = 600.0


@pytest.fixture(scope="module", autouse=True)
def _own_fork_server() -> Iterator[None]:
    yield
    stop_templates()


@pytest.fixture
def printed() -> list[OutputLine]:
    """Collect what the workers print."""
    return []


def rank() -> int:
    return int(os.environ["RANK"])


def in_group(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that makes a process group, uses it once, and goes on."""

    def main() -> None:
        from torch import distributed

        distributed.init_process_group("gloo")
        distributed.barrier()
        function()

    return main


def reduce_alone() -> None:
    import torch
    from torch import distributed

    if rank() == 1:
        distributed.all_reduce(torch.ones(3))


def backward_alone() -> None:
    import torch

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    for _ in range(2 + rank()):
        model(torch.ones(1, 2)).sum().backward()


def do_two_things() -> None:
    import torch
    from torch import distributed

    if rank() == 1:
        distributed.all_reduce(torch.ones(3))
    else:
        distributed.barrier()


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (reduce_alone, r"Rank 1 waits in `all_reduce` \(test_hangs.py:\d+ in reduce_alone\)"),
        pytest.param(
            backward_alone,
            r"Rank 1 waits in `backward` \(test_hangs.py:\d+ in backward_alone\)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            do_two_things,
            "Rank 0 waits in `barrier` .* and rank 1 waits in `all_reduce`",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_do_not_fit_together_are_named_with_all_stacks(
    function: Callable[[], None],
    said: str,
    printed: list[OutputLine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    with LocalPool(2, on_line=printed.append) as pool:
        with pytest.raises(CollectiveMismatchError, match=said) as info:
            pool.submit(in_group(function)).wait()
        if function is not do_two_things:
            assert "but rank 0 has returned without. Missing ranks: 0." in str(info.value)
    assert [record.getMessage()[:6] for record in caplog.records] == ["Rank 0", "Rank 1"]
    for number in range(2):
        stack = [line.text for line in printed if line.rank == number]
        assert any("most recent call first" in text for text in stack), stack
    assert any(f" in {function.__name__}" in line.text for line in printed)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_a_lost_worker(printed: list[OutputLine]) -> None:
    def wait_for_another() -> None:
        from torch import distributed

        if rank() == 0:
            time.sleep(LONG_S)
        distributed.barrier()

    with LocalPool(2, on_line=printed.append, collective_timeout_s=6.0) as pool:
        call = pool.submit(in_group(wait_for_another))
        with pytest.raises(
            WorkerFailedError, match=r"has not come there. Missing ranks: 0"
        ) as info:
            call.wait()
        assert info.value.rank == 0


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [0, 2])
def test_a_rank_whose_data_loader_hangs_is_named_with_what_it_reads(
    printed: list[OutputLine], hanging: int
) -> None:
    def read_all() -> None:
        import torch
        from torch import distributed

        class Pictures(torch.utils.data.Dataset[int]):
            def __len__(self) -> int:
                return 4

            def __getitem__(self, index: int) -> int:
                if index == 2 and rank() == hanging:
                    time.sleep(LONG_S)
                return index

        for _ in torch.utils.data.DataLoader(Pictures(), num_workers=1):
            distributed.barrier()

    said = rf"Missing ranks: {hanging}. Rank {hanging} is at .* in read_all, in a data loader."
    with (
        LocalPool(3, on_line=printed.append, collective_timeout_s=6.0) as pool,
        pytest.raises(WorkerFailedError, match=said),
    ):
        pool.submit(in_group(read_all)).wait()
    # The process that reads says where it is.
    assert any("in __getitem__" in line.text for line in printed if line.rank == hanging)


@pytest.mark.slow
def test_patience_is_kept_with_a_slow_rank(printed: list[OutputLine]) -> None:
    def wait_for_another() -> None:
        from torch import distributed

        time.sleep(7.0 * rank())
        distributed.barrier()

    with LocalPool(2, on_line=printed.append) as pool:
        assert pool.submit(in_group(wait_for_another)).wait() == [None, None]


@pytest.mark.long
def test_a_call_ends_if_its_workers_end_while_they_write_their_stacks(
    printed: list[OutputLine], tmp_path: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(_generation, "_STACKS_S", LONG_S)

    def leave_meanwhile() -> None:
        def leave() -> None:
            while not (tmp_path / "go").exists():
                time.sleep(0.05)
            os._exit(3)

        threading.Thread(target=leave).start()
        do_two_things()

    with LocalPool(2, on_line=printed.append) as pool:
        call = pool.submit(in_group(leave_meanwhile))
        while "Rank 1 has waited" not in caplog.text:
            assert call.wait(0.05) is None
        (tmp_path / "go").touch()
        with pytest.raises(CollectiveMismatchError, match="these must be the same"):
            call.wait()


@pytest.mark.long
@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_log_tells_early_whom_the_others_wait_for(
    printed: list[OutputLine], late: int, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(stuck_ranks, "_NOTICE_S", 1.0)
    said = rf"Missing ranks: {late}. Rank {late} is at test_hangs.py:\d+ in wait_for_file"

    def wait_for_file() -> None:
        from torch import distributed

        while rank() == late and not (tmp_path / "go").exists():
            time.sleep(0.05)
        distributed.barrier()

    with LocalPool(3, on_line=printed.append) as pool:
        call = pool.submit(in_group(wait_for_file))
        while not re.search(said, caplog.text):
            assert call.wait(0.05) is None
        (tmp_path / "go").touch()
        assert call.wait() == [None] * 3


def hold_the_lock() -> None:
    if rank() == 1:
        ctypes.PyDLL(None).sleep(int(LONG_S))


def stop_oneself() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "said"),
    [(hold_the_lock, "Rank 1 hangs"), (stop_oneself, r"Rank 1 is stopped \(SIGSTOP\)")],
)
def test_a_rank_without_a_sign_of_life_is_a_lost_worker(
    function: Callable[[], None],
    said: str,
    printed: list[OutputLine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def has_not_begun(pid: int, signum: int) -> bool:
        asked.append(pid)
        return len(asked) < 5

    monkeypatch.setattr(_generation, "has_pending_signal", has_not_begun)
    with LocalPool(2, on_line=printed.append, heartbeat_timeout_s=8.0) as pool:
        pids = [process.pid for process in pool.processes]
        with pytest.raises(WorkerFailedError, match=f"{said}: it gave no sign of life") as info:
            pool.submit(function).wait()
        assert info.value.rank == 1
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    # Workers that wait for the processor get the time to write where they are.
    assert len(asked) >= 5
    if function is hold_the_lock:
        assert any("in hold_the_lock" in line.text for line in printed if line.rank == 1)


def test_of_a_killed_rank_and_those_that_miss_it_the_killed_one_is_named() -> None:
    def die() -> None:
        import torch
        from torch import distributed

        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.all_reduce(torch.ones(3))

    with (
        LocalPool(3, on_line=lambda _: None) as pool,
        pytest.raises(WorkerFailedError, match="Rank 1 was ended by SIGKILL"),
    ):
        pool.submit(in_group(die)).wait()
