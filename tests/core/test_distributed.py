import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline._base.run_directory import JournalKey
from paceline.core import DistributedContext, RunState, list_runs
from paceline.journal import RunDirectory

PLACE = {
    "rank": 0,
    "size": 1,
    "local_rank": 0,
    "local_size": 1,
    "cross_rank": 0,
    "cross_size": 1,
}

# Gloo threads may abort a process at its end: the scripts leave as the launcher's workers do.
LEAVE = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"

EXCHANGES = """
import json, sys
from paceline import core
def exchange(distributed):
    rank = distributed.rank
    found = {
        "facts": [distributed.get_rank(), distributed.get_size(), distributed.get_local_rank()],
        "gather": distributed.gather({"rank": rank}),
        "allgather": distributed.allgather(rank),
        "broadcast": distributed.broadcast(["chief"] if rank == 0 else None),
        "gather_local": distributed.gather_local(rank),
        "allgather_local": distributed.allgather_local(rank),
        "broadcast_local": distributed.broadcast_local(rank),
        "num_agents": distributed.get_num_agents(),
    }
    # One write a line: torchrun turns buffers off, and three ranks share one stream.
    sys.stdout.write(json.dumps(found) + "\\n")
    sys.stdout.flush()
"""


def expected_exchange(rank: int, *, num_nodes: int = 1) -> dict[str, Any]:
    """Return what a rank of three must find on one node, or with one rank per node."""
    local = [rank] if num_nodes == 3 else [0, 1, 2]
    return {
        "facts": [rank, 3, 0 if num_nodes == 3 else rank],
        "gather": [{"rank": 0}, {"rank": 1}, {"rank": 2}] if rank == 0 else None,
        "allgather": [0, 1, 2],
        "broadcast": ["chief"],
        "gather_local": local if rank == local[0] else None,
        "allgather_local": local,
        "broadcast_local": local[0],
        "num_agents": num_nodes,
    }


def test_single_process_exchanges_with_itself_and_loads_no_torch(
    run_python: Callable[..., Any],
) -> None:
    code = (
        EXCHANGES
        + """
with core.DistributedContext.from_torch_distributed() as distributed:
    exchange(distributed)
assert "torch" not in sys.modules
"""
    )
    for environment in ({}, {"WORLD_SIZE": "1"}):
        result = run_python(code, **environment)
        found = json.loads(result.stdout)
        assert found["gather"] == [{"rank": 0}]
        assert found["allgather"] == found["allgather_local"] == [0]
        assert (found["broadcast"], found["num_agents"]) == (["chief"], 1)


@pytest.mark.parametrize(
    "group",
    ["never", *(pytest.param(when, marks=pytest.mark.slow) for when in ("before", "after"))],
)
def test_three_ranks_exchange_with_or_without_a_process_group(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any], group: str
) -> None:
    begin = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    code = (
        EXCHANGES
        + (begin if group == "before" else "")
        + "distributed = core.DistributedContext.from_torch_distributed(timeout_s=60)\n"
        + (begin if group == "after" else "")
        + "exchange(distributed)\ndistributed.close()\n"
        + LEAVE
    )
    for rank, (exit_code, output, errors) in enumerate(finish_ranks(start_ranks(code))):
        assert exit_code == 0, errors
        assert json.loads(output) == expected_exchange(rank)


def test_ranks_of_several_nodes_exchange_by_the_explicit_constructor(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    code = (
        EXCHANGES
        + """
import os
rank = int(os.environ["RANK"])
with core.DistributedContext(
    rank=rank, size=3, local_rank=0, local_size=1, cross_rank=rank, cross_size=3,
    chief_ip="127.0.0.1", chief_port=int(os.environ["MASTER_PORT"]), timeout_s=60,
) as distributed:
    exchange(distributed)
"""
        + LEAVE
    )
    for rank, (exit_code, output, errors) in enumerate(finish_ranks(start_ranks(code))):
        assert exit_code == 0, errors
        assert json.loads(output) == expected_exchange(rank, num_nodes=3)


TORCHRUN_SCRIPT = (
    EXCHANGES
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
distributed = core.DistributedContext.from_torch_distributed(timeout_s=60)
with core.init(distributed=distributed) as context:
    exchange(distributed)
    if distributed.rank == 0:
        context.train.report_training_metrics(1, {"loss": 0.5})
        with context.checkpoint.store_path({"steps_completed": 1}) as (path, uuid):
            (path / "a").write_text("1")
    else:
        for refused in (
            lambda: context.train.report_progress(0.5),
            lambda: context.train.set_status("at work"),
            lambda: context.checkpoint.upload(".", {"steps_completed": 1}),
            lambda: context.checkpoint.delete("u"),
        ):
            try:
                refused()
            except RuntimeError as error:
                assert f"rank {distributed.rank}" in str(error), error
            else:
                raise AssertionError(refused)
    for operation in context.searcher.operations():
        assert operation.length == 1
        if distributed.rank == 0:
            operation.report_completed(0.5)
    assert distributed.allgather(context.preempt.should_preempt()) == [False] * 3
    assert len(set(distributed.allgather(str(context.run_dir)))) == 1
dist.destroy_process_group()
"""
    + LEAVE
)


@pytest.mark.long
def test_under_torchrun_the_chief_names_one_run_directory(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(TORCHRUN_SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "script.py"]
    result = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**clean_environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = sorted(map(json.loads, result.stdout.splitlines()), key=lambda line: line["facts"])
    assert found == [expected_exchange(rank) for rank in range(3)]
    (summary,) = list_runs(tmp_path / "paceline_runs")
    assert (summary.name, summary.state, summary.last_step) == ("script", RunState.COMPLETED, 1)
    assert RunDirectory(summary.path).journal_keys() == [JournalKey(0, 0, r) for r in range(3)]


@pytest.mark.long
def test_keys_are_cleaned_up_over_many_calls(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    code = (
        """
from paceline import core
distributed = core.DistributedContext.from_torch_distributed(timeout_s=60)
for number in range(1000):
    assert distributed.broadcast(number) == number
    assert distributed.allgather(number) == [number, number]
    distributed.gather(number)
    distributed.allgather_local(number)
    if number == 200:
        before = distributed._transport._store.num_keys()
distributed.allgather(None)
print(distributed._transport._store.num_keys() - before)
distributed.close()
"""
        + LEAVE
    )
    for exit_code, output, errors in finish_ranks(start_ranks(code, size=2)):
        assert exit_code == 0, errors
        # A few keys of the last calls may still be on their way out.
        assert int(output) < 20


MISMATCH = "paceline._base.exceptions.CollectiveMismatchError: All ranks must make the same calls"
# Ranks begin at different times on a busy machine; the short timeout counts once all are there.
CALLS = """
import os, sys, time
from pathlib import Path
from paceline import core
present = [int(rank) for rank in os.environ["PRESENT"].split(",")]
distributed = core.DistributedContext.from_torch_distributed(timeout_s=60 if 0 in present else 4)
Path(f"ready{distributed.rank}").touch()
while not all(Path(f"ready{rank}").exists() for rank in present):
    time.sleep(0.01)
distributed.timeout_s = 4
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("broadcast", (0,)),
        ("gather", (1,)),
        pytest.param("gather", (0,), marks=pytest.mark.slow),
        pytest.param("allgather", (1, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rank_that_never_comes_is_named_after_the_timeout(
    start_ranks: Callable[..., Any],
    finish_ranks: Callable[..., Any],
    call: str,
    missing: tuple[int, ...],
) -> None:
    code = CALLS + f"distributed.{call}(1)\n"
    present = ",".join(str(rank) for rank in range(3) if rank not in missing)
    for exit_code, _, errors in finish_ranks(start_ranks(code, missing=missing, PRESENT=present)):
        assert exit_code == 1
        assert "DistributedTimeoutError" in errors
        assert f"Missing ranks: {', '.join(map(str, missing))}." in errors


@pytest.mark.parametrize("alone", [0, 2])
@pytest.mark.parametrize("operation", ["gather", "allgather", "broadcast", "broadcast_local"])
def test_a_call_that_one_rank_makes_alone_is_named(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any], operation: str, alone: int
) -> None:
    code = f"""
from paceline import core
def evaluate(distributed):
    # What the others pass to another call must not be taken for this one's values.
    values = {"[(1.0, 2)]" if operation.startswith("broadcast") else "(1.0, 2)"}
    for loss, weight in distributed.{operation}(values) or []:
        pass
with core.init(
    distributed=core.DistributedContext.from_torch_distributed(timeout_s=600)
) as context:
    if context.distributed.rank == {alone}:
        evaluate(context.distributed)
    for _ in range(3):
        context.preempt.should_preempt()
        context.distributed.allgather_local(None)
"""
    results = finish_ranks(start_ranks(code))
    assert [exit_code for exit_code, _, _ in results] == [1, 1, 1]
    named = [errors for _, _, errors in results if "\n" + MISMATCH in errors]
    assert named, results
    for _, _, errors in results:
        assert f"rank {alone} called `distributed.{operation}` (ranks.py:6 in evaluate)" in errors
        assert "called `should_preempt` (ranks.py:14 in <module>)" in errors


def test_ranks_may_make_one_call_from_different_places(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    code = """
from paceline import core
def lead(distributed):
    return distributed.broadcast("chief"), distributed.gather(0)
def follow(distributed):
    return distributed.broadcast(None), distributed.gather(distributed.rank)
distributed = core.DistributedContext.from_torch_distributed(timeout_s=600)
print(lead(distributed) if distributed.rank == 0 else follow(distributed))
distributed.close()
"""
    results = finish_ranks(start_ranks(code + LEAVE))
    assert [exit_code for exit_code, _, _ in results] == [0, 0, 0], results
    assert [output.strip() for _, output, _ in results] == [
        "('chief', [0, 1, 2])",
        "('chief', None)",
        "('chief', None)",
    ]


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_ends_in_an_error_that_names_it(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any], victim: int
) -> None:
    code = (
        CALLS
        + f"""
import os, signal
from paceline.core import _key_value_store
distributed.timeout_s = 600
distributed.allgather(None)
if distributed.rank == {victim}:
    os.kill(os.getpid(), signal.SIGKILL)
# On a busy machine rank 1 looks later than rank 0.
_key_value_store._HOST_STAYS_S = 6.0
if distributed.rank == 1:
    _key_value_store._FAILURE_CHECK_S = 0.7
distributed.allgather(None)
"""
    )
    results = finish_ranks(start_ranks(code, PRESENT="0,1,2"))
    assert [exit_code for exit_code, _, _ in results] == [
        -signal.SIGKILL if rank == victim else 1 for rank in range(3)
    ]
    for rank, (_, _, errors) in enumerate(results):
        if rank == victim:
            continue
        # Rank 0 hosts the store, so its end is seen at once.
        expected = "has ended: rank 0" if victim == 0 else "the process of rank 2 has ended"
        assert expected in errors


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("kind", ["Long", "Textless"])
def test_rank_whose_exception_has_an_odd_text_is_named(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any], kind: str, failing: int
) -> None:
    code = f"""
from paceline import core
class Long(Exception):
    def __str__(self):
        return "L" * 10_000_000
class Textless(Exception):
    def __str__(self):
        raise LookupError("no text")
with core.init(
    distributed=core.DistributedContext.from_torch_distributed(timeout_s=600)
) as context:
    if context.distributed.rank == {failing}:
        raise {kind}
    context.distributed.allgather(None)
"""
    text = "L" * 2000 if kind == "Long" else "<exception str() failed>"
    for rank, (exit_code, _, errors) in enumerate(finish_ranks(start_ranks(code))):
        assert exit_code == 1
        own = f"{kind}: {text}"
        assert (own if rank == failing else f"rank {failing} failed: {own}") in errors


def test_rank_that_leaves_by_an_exception_is_named_soon(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    code = """
from paceline import core
with core.init(
    distributed=core.DistributedContext.from_torch_distributed(timeout_s=600)
) as context:
    if context.distributed.rank == 1:
        raise ValueError("boom\\nin shard 3")
    context.distributed.allgather(None)
"""
    results = finish_ranks(start_ranks(code, size=2))
    assert [exit_code for exit_code, _, _ in results] == [1, 1]
    assert "DistributedPeerError" in results[0][2]
    assert "rank 1 failed: ValueError: boom\n" in results[0][2]
    assert "shard" not in results[0][2]


def test_chief_that_cannot_start_tells_the_others(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    code = """
from paceline import core
core.init(
    distributed=core.DistributedContext.from_torch_distributed(timeout_s=600), resume="nowhere"
)
"""
    results = finish_ranks(start_ranks(code, size=2))
    assert "NotARunDirectoryError" in results[0][2]
    assert "rank 0 failed: NotARunDirectoryError" in results[1][2]


def test_invalid_hyperparameters_on_one_rank_end_all_with_code_zero(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    code = """
import paceline
from paceline import core
with core.init(
    distributed=core.DistributedContext.from_torch_distributed(timeout_s=600)
) as context:
    if context.distributed.rank == 1:
        raise paceline.InvalidHP("too small")
    context.preempt.should_preempt()
    context.distributed.allgather(None)
"""
    results = finish_ranks(start_ranks(code, size=2))
    assert [exit_code for exit_code, _, _ in results] == [0, 0], results
    (summary,) = list_runs(tmp_path / "paceline_runs")
    assert summary.state is RunState.INVALID_HP


PREEMPTED = """
import time
from paceline import core
with core.init(
    distributed=core.DistributedContext.from_torch_distributed(timeout_s=60)
) as context:
    context.preempt.should_preempt()
    context.distributed.allgather(None)
    print("ready", flush=True)
    calls = 0
    while not context.preempt.should_preempt():
        calls += 1
        time.sleep(0.01)
    assert len(set(context.distributed.allgather(calls))) == 1
"""


@pytest.mark.parametrize(
    ("signalled", "size"), [((0,), 3), pytest.param((0, 1), 2, marks=pytest.mark.slow)], ids=str
)
def test_all_ranks_take_the_same_answer_at_the_same_call(
    start_ranks: Callable[..., Any],
    finish_ranks: Callable[..., Any],
    tmp_path: Path,
    signalled: tuple[int, ...],
    size: int,
) -> None:
    processes = start_ranks(PREEMPTED, size=size)
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for rank in signalled:
        processes[rank].send_signal(signal.SIGTERM)
    results = finish_ranks(processes)
    assert [exit_code for exit_code, _, _ in results] == [0] * size, results
    (summary,) = list_runs(tmp_path / "paceline_runs")
    assert summary.state is RunState.PREEMPTED


def test_a_signal_to_any_rank_preempts_all(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    code = """
import os, signal
from paceline import core
with core.init(
    distributed=core.DistributedContext.from_torch_distributed(timeout_s=60)
) as context:
    context.preempt.should_preempt()
    if context.distributed.rank == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    assert context.preempt.should_preempt()
"""
    results = finish_ranks(start_ranks(code, size=3))
    assert [exit_code for exit_code, _, _ in results] == [0, 0, 0], results


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rank": 1}, "`rank` must be from 0 to `size` - 1, but got rank=1 and size=1"),
        ({"local_rank": -1}, "`local_rank` must be"),
        ({"cross_size": 0}, "`cross_rank` must be"),
        ({"size": 2, "local_size": 2}, "`chief_port` must be given"),
        ({"size": 2, "cross_size": 2}, "`chief_ip` must be given with several nodes"),
        ({"timeout_s": 0}, "`timeout_s` must be above 0"),
    ],
)
def test_wrong_place_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        DistributedContext(**{**PLACE, **changes})


@pytest.mark.parametrize(("name", "value"), [("RANK", None), ("LOCAL_RANK", "x")])
def test_wrong_variable_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    for variable, text in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(variable, text)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"variable {name} must be a number"):
        DistributedContext.from_torch_distributed()


def test_chief_may_leave_before_the_others_have_read(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    code = """
import os, time
from paceline import core
with core.DistributedContext.from_torch_distributed(timeout_s=30) as distributed:
    if distributed.rank != 0:
        time.sleep(0.5)
    assert distributed.broadcast("value" if distributed.rank == 0 else None) == "value"
"""
    results = finish_ranks(start_ranks(code, size=2))
    assert [exit_code for exit_code, _, _ in results] == [0, 0], results


def test_a_failed_chief_does_not_wait_for_a_rank_that_was_killed(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    # A wait for it would last longer than this test may.
    code = """
import os, signal
from paceline import core
from paceline.core import _key_value_store
_key_value_store._LEAVE_AFTER_FAILURE_S = _key_value_store._LEAVE_S = 3600
distributed = core.DistributedContext.from_torch_distributed(timeout_s=30)
distributed.allgather(0)
if distributed.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    distributed.allgather(1)
except core.DistributedPeerError as error:
    distributed.fail(error)
    print("has left", flush=True)
    os._exit(0)
"""
    (code, out, _), (killed, _, _) = finish_ranks(start_ranks(code, size=2))
    assert (code, out.strip(), killed) == (0, "has left", -9)


def test_contexts_may_follow_each_other_in_the_same_processes(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    code = """
from paceline import core
for number in range(3):
    with core.DistributedContext.from_torch_distributed(timeout_s=30) as distributed:
        assert distributed.allgather((number, distributed.rank)) == [(number, 0), (number, 1)]
    distributed.close()
    try:
        distributed.allgather(None)
    except RuntimeError as error:
        assert "closed `DistributedContext` must not be used" in str(error)
    else:
        raise AssertionError
"""
    results = finish_ranks(start_ranks(code, size=2))
    assert [exit_code for exit_code, _, _ in results] == [0, 0], results


LOCAL_RANKS = """
import os
if "GROUP" in os.environ:
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE="1")
else:
    del os.environ["LOCAL_WORLD_SIZE"]
from paceline import core
with core.init() as context:
    each = context.distributed
    print(each.local_rank, each.local_size, each.cross_rank, each.cross_size)
    print(each.allgather_local(each.rank))
"""


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, [(f"{rank} 3 0 1", "[0, 1, 2]") for rank in range(3)]),
        ({"GROUP": "1"}, [(f"0 1 {rank} 3", f"[{rank}]") for rank in range(3)]),
    ],
)
def test_a_script_may_call_each_process_the_first_of_its_node(
    told: dict[str, str],
    expected: list[tuple[str, str]],
    start_ranks: Callable[..., list[Any]],
    finish_ranks: Callable[..., list[tuple[int, str, str]]],
) -> None:
    results = finish_ranks(start_ranks(LOCAL_RANKS, LOCAL_RANK="0", **told), timeout_s=60)
    assert [code for code, *_ in results] == [0] * 3, results
    assert [tuple(output.splitlines()) for _, output, _ in results] == expected
