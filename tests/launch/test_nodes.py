"""Launchers of several nodes, which all run on this machine; with real processes and signals."""

import os
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from paceline._base.process_and_network import PortReservation
from paceline._training.workers import launch_nodes as _launch_nodes
from paceline._training.workers.channels import BlockingChannel
from paceline._training.workers.launch_nodes_server import (
    LONGEST_BYTES,
    PROTOCOL,
    NodeMessage,
    NodeMessageKind,
)
from paceline._training.workers.worker_failures import RestartDecision
from paceline.core import RunState, list_runs
from paceline.testing._compare_runs import compare_runs, read_run_facts

Launcher = subprocess.Popen[str]
Script = Callable[..., str]
StartNode = Callable[..., Launcher]

WAITS = """
import os, pathlib, sys, time

for number in range(9):
    path = pathlib.Path(f"up-{os.environ['RANK']}-{number}")
    if not path.exists():
        path.with_suffix(".part").write_text(str(os.getpid()))
        path.with_suffix(".part").rename(path)
        break
while not pathlib.Path("go").exists():
    time.sleep(0.02)
sys.stdout.write(f"done in start {number}\\n")
"""

TRAIN = """
import os, time

def before_batch(distributed, batch_idx):
    open(f"batch-{distributed.rank}", "w").close()
    time.sleep(float(os.environ.get("PAUSE_S", "0")))

with pytorch.init(hparams={"global_batch_size": 8}, seed=3, name=os.environ["NAME"]) as context:
    trial = Trial(context)
    pytorch.Trainer(trial, context).fit(
        max_length=pytorch.Batch(int(os.environ.get("LENGTH", "20"))),
        checkpoint_period=pytorch.Batch(5),
        reporting_period=pytorch.Batch(1),
    )
"""

REFUSES = """
import os, time
from paceline import InvalidHP, core

distributed = core.DistributedContext.from_torch_distributed()
with core.init(distributed=distributed):
    distributed.allgather(0)
    if distributed.rank == 1:
        raise InvalidHP("too wide")
    time.sleep(600)
"""


HANGS = """
import os, sys, time
import torch
from torch import distributed
from paceline import core

def wait_for_nothing():
    time.sleep(600)

context = core.DistributedContext.from_torch_distributed()
with core.init(distributed=context):
    distributed.init_process_group("gloo")
    distributed.barrier()
    if os.environ["RANK"] == sys.argv[1]:
        if sys.argv[2] == "returns":
            sys.exit()
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), 9)
        if sys.argv[2] == "asleep":
            wait_for_nothing()
        distributed.barrier()
    else:
        distributed.all_reduce(torch.ones(1))
"""


@pytest.fixture
def master_port() -> Iterator[int]:
    with PortReservation() as reservation:
        yield reservation.port


@pytest.fixture
def start_node(start_launcher: Callable[..., Any], master_port: int) -> StartNode:
    """Start the launcher of one node of a test's group."""

    def start(
        rank: int,
        *arguments: str,
        nodes: int = 2,
        address: str = "127.0.0.1",
        **environment: str,
    ) -> Any:
        place = [f"--nnodes={nodes}", f"--node-rank={rank}", f"--master-addr={address}"]
        place += [f"--master-port={master_port}"]
        # Not every machine can find the address of its own host name.
        return start_launcher(*place, *arguments, **environment, GLOO_SOCKET_IFNAME="lo")

    return start


def is_free_to_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def ends(launchers: Sequence[Launcher]) -> list[tuple[int, str, str]]:
    results = []
    for launcher in launchers:
        out, err = launcher.communicate(timeout=240)
        assert 'Traceback (most recent call last):\n  File "<frozen runpy>' not in err
        results.append((launcher.returncode, out, err))
    return results


def wait_for(paths: Sequence[Path], launchers: Sequence[Launcher]) -> list[int]:
    """Wait for files, and return the process ids that they may hold."""
    while not all(path.exists() for path in paths):
        assert all(launcher.poll() is None for launcher in launchers), ends(launchers)
        time.sleep(0.05)
    return [int(path.read_text() or 0) for path in paths]


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def assert_ended(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker is left"
        time.sleep(0.05)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_exit_of_a_worker_on_any_node_ends_all(
    start_node: StartNode, script: Script, rank: int
) -> None:
    text = "import os, sys, time\nif os.environ['RANK'] == sys.argv[1]: sys.exit(3)"
    name = script(text + "\ntime.sleep(600)")
    launchers = [start_node(n, "--nproc-per-node=2", name, str(rank)) for n in range(2)]
    told = f"Node {rank // 2}: Rank {rank} exited with code 3, the first of 4 to fail"
    for code, _, err in ends(launchers):
        assert code == 3
        assert told in err


# `test_restarts.py` compares the bits in every run, and others here start all nodes again.
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.timeout(300)
def test_training_that_lost_a_worker_of_any_node_ends_in_the_same_bits(
    start_node: StartNode, script: Script, tmp_path: Path, dropout_trial: str, rank: int
) -> None:
    name = script(dropout_trial + TRAIN)
    fault = {"PACELINE_FAULT": f"engine.batch:13,signal=KILL,rank={rank}"}
    for run, variables in (("straight", {}), ("killed", fault)):
        launchers = [start_node(n, "--max-restarts=3", name, NAME=run, **variables) for n in (0, 1)]
        for code, _, err in ends(launchers):
            assert code == 0, err
            told = f"Node {rank}: Rank {rank} was ended by SIGKILL, the first of 2 to fail"
            assert (told in err) == (run == "killed")
            assert ("Starting the workers again, restart 1 of 3" in err) == (run == "killed")
    runs = {run.name: run for run in list_runs(tmp_path / "paceline_runs")}
    assert runs["straight"].num_attempts == 1
    # Where the checkpoint before the kill is not yet whole, the same batch is met once more.
    assert runs["killed"].num_attempts in (2, 3)
    assert {run.state for run in runs.values()} == {RunState.COMPLETED}
    straight, killed = (read_run_facts(runs[n].path) for n in ("straight", "killed"))
    assert compare_runs(straight, killed) == []


def test_a_worker_that_fails_each_time_is_started_no_third_time_on_any_of_three_nodes(
    start_node: StartNode, script: Script
) -> None:
    text = "import os, sys, time\nsys.stdout.write('begun\\n')\nsys.stdout.flush()\n"
    name = script(text + "if os.environ['RANK'] == '2': raise ValueError('x')\ntime.sleep(600)")
    launchers = [start_node(n, "--max-restarts=5", name, nodes=3) for n in range(3)]
    for code, out, err in ends(launchers):
        assert code == 1
        assert out.split("\n")[:-1].count("[rank=2] begun") in (0, 2)
        assert "Node 2: Rank 2 exited with code 1 (ValueError: x), the first of 3 to fail" in err
        assert err.count("Starting the workers again") == 1
        assert "the same way twice with no checkpoint in between" in err


LEAVES_LATE = """
import os, sys, time
from paceline import core

if os.environ["RANK"] == sys.argv[1]:
    # As on a full disk, where a rank tries for a while to store its end.
    time.sleep(5)
    raise OSError("the disk is full")
raise core.DistributedPeerError(f"rank {sys.argv[1]} failed: OSError", error_type="OSError")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "num_nodes"),
    [
        *(pytest.param(*place, marks=pytest.mark.slow) for place in ((0, 1), (2, 3))),
        (2, 1),
        (0, 3),
    ],
)
def test_a_rank_that_leaves_long_after_it_has_failed_is_named_as_the_cause(
    start_node: StartNode, script: Script, rank: int, num_nodes: int
) -> None:
    options = [f"--nproc-per-node={3 // num_nodes}", script(LEAVES_LATE), str(rank)]
    launchers = [start_node(n, *options, nodes=num_nodes) for n in range(num_nodes)]
    told = f"Rank {rank} exited with code 1 (OSError: the disk is full), the first of 3"
    if num_nodes > 1:
        told = f"Node {rank}: {told}"
    for code, _, err in ends(launchers):
        assert code == 1
        assert told in err


def test_invalid_hp_on_another_node_ends_the_run_as_a_success(
    start_node: StartNode, script: Script, tmp_path: Path
) -> None:
    launchers = [start_node(n, "--max-restarts=2", script(REFUSES)) for n in range(2)]
    for code, _, err in ends(launchers):
        assert code == 0, err
        assert "Rank 1 refused the hyperparameters (InvalidHP: too wide)" in err
        assert "Starting the workers again" not in err
    (run,) = list_runs(tmp_path / "paceline_runs")
    assert run.state is RunState.INVALID_HP


@pytest.mark.long
@pytest.mark.parametrize(
    ("signalled", "signum", "address"),
    [
        pytest.param([1], signal.SIGTERM, "127.0.0.1", id="SIGTERM-1", marks=pytest.mark.slow),
        pytest.param([1], signal.SIGTERM, "::1", id="SIGTERM-1-IPv6"),
        pytest.param([0, 1], signal.SIGINT, "::1", id="SIGINT-both-IPv6", marks=pytest.mark.slow),
    ],
)
def test_a_request_to_end_to_some_launchers_stores_a_checkpoint_and_ends_all(
    start_node: StartNode,
    script: Script,
    tmp_path: Path,
    dropout_trial: str,
    signalled: list[int],
    signum: signal.Signals,
    address: str,
) -> None:
    if not is_free_to_bind(address):
        pytest.skip(f"NOT TESTED: this machine has no address {address}")
    name = script(dropout_trial + TRAIN)
    variables = {"NAME": "long", "LENGTH": "100000", "PAUSE_S": "0.02"}
    launchers = [
        start_node(n, "--max-restarts=2", name, address=address, **variables) for n in range(2)
    ]
    wait_for([tmp_path / f"batch-{rank}" for rank in range(2)], launchers)
    for node in signalled:
        launchers[node].send_signal(signum)
    for code, _, err in ends(launchers):
        assert code == 0, err
        assert "Starting the workers again" not in err
    (run,) = list_runs(tmp_path / "paceline_runs")
    assert run.state is RunState.PREEMPTED
    assert run.latest_checkpoint is not None


def test_a_request_to_end_workers_that_do_not_know_it_is_no_restart(
    start_node: StartNode, script: Script, tmp_path: Path
) -> None:
    launchers = [start_node(n, "--max-restarts=2", script(WAITS)) for n in range(2)]
    pids = wait_for([tmp_path / f"up-{rank}-0" for rank in range(2)], launchers)
    launchers[1].terminate()
    for code, _, err in ends(launchers):
        assert code == 128 + signal.SIGTERM
        assert "No restart follows, as this process received SIGTERM" in err
    assert_ended(pids)


def test_a_launcher_that_was_killed_may_come_back_whatever_else_connects(
    start_node: StartNode, script: Script, tmp_path: Path, master_port: int
) -> None:
    options = ["--max-restarts=1", script(WAITS)]
    launchers = [start_node(n, *options) for n in range(2)]
    before = wait_for([tmp_path / f"up-{rank}-0" for rank in range(2)], launchers)
    with ExitStack() as stack:
        # More than may wait; some say nothing, others what no launcher says.
        sayings = [
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            struct.pack("!BQQ", 20, 0, 2**60),
            os.urandom(99),
        ]
        sayings += [struct.pack("!BQQ", 20, 0, len(b)) + b for b in (b"[" * 50000, b"{}", b"1")]
        for number in range(200):
            end = stack.enter_context(socket.create_connection(("127.0.0.1", master_port)))
            end.sendall(sayings[number % len(sayings)])
        launchers[1].kill()
        assert_ended(before[1:])
        returned = start_node(1, *options)
        after = wait_for([tmp_path / f"up-{rank}-1" for rank in range(2)], [launchers[0], returned])
        (tmp_path / "go").touch()
        (code, _, err), (other_code, _, other_err) = ends([launchers[0], returned])
    assert (code, other_code) == (0, 0), err + other_err
    assert "The launcher of node 1 was lost: its connection was closed" in err
    again = "Starting the workers again, restart 1 of 1, once there is a launcher of node 1 (within"
    assert again in err
    # The cause comes before all that follows from it.
    told = [line for line in err.splitlines() if line.startswith(("WARNING", "ERROR"))]
    causes = [line for line in told if "refused" not in line]
    assert "The launcher of node 1 was lost" in causes[0]
    assert_ended([*before, *after])


@pytest.mark.long
@pytest.mark.parametrize(
    ("restarts", "code"), [pytest.param(0, 137, marks=pytest.mark.slow), (1, 2)]
)
def test_a_launcher_that_was_killed_and_does_not_come_back_is_named(
    start_node: StartNode, script: Script, tmp_path: Path, restarts: int, code: int
) -> None:
    options = [f"--max-restarts={restarts}", "--nodes-timeout-s=20", script(WAITS)]
    launchers = [start_node(n, *options) for n in range(2)]
    pids = wait_for([tmp_path / f"up-{rank}-0" for rank in range(2)], launchers)
    launchers[1].kill()
    ((returncode, _, err),) = ends(launchers[:1])
    assert returncode == code, err
    assert "The launcher of node 1 was lost: its connection was closed" in err
    assert ("there is none of node 1." in err) == bool(restarts)
    assert_ended(pids)


@pytest.mark.long
def test_a_launcher_that_is_stopped_counts_as_lost(
    start_node: StartNode, script: Script, tmp_path: Path
) -> None:
    options = ["--heartbeat-timeout-s=12", script(WAITS)]
    launchers = [start_node(n, *options) for n in range(2)]
    pids = wait_for([tmp_path / f"up-{rank}-0" for rank in range(2)], launchers)
    launchers[1].send_signal(signal.SIGSTOP)
    ((code, _, err),) = ends(launchers[:1])
    assert code == 137
    assert "The launcher of node 1 was lost: it gave no sign of life for" in err
    launchers[1].send_signal(signal.SIGCONT)
    ((code, _, err),) = ends(launchers[1:])
    assert code == 137
    assert "The launcher of node 0 was lost" in err
    assert_ended(pids)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "what", "said"),
    [
        (2, "asleep", r"rank 2 has not come there. Missing ranks: 2. Rank 2 is at .*for_nothing"),
        pytest.param(
            0, "asleep", r"has not come there. Missing ranks: 0. Rank 0 is at .*for_nothing",
            marks=pytest.mark.slow,
        ),
        (2, "returns", "Rank 2 has returned while others waited .* Hint: all ranks must"),
        pytest.param(
            0, "returns", "Rank 0 has returned while others waited .* Hint: all ranks must",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2, "killed", "Node 2: Rank 2 was ended by SIGKILL", marks=pytest.mark.slow
        ),
        pytest.param(
            0, "killed", "Node 0: Rank 0 was ended by SIGKILL", marks=pytest.mark.slow
        ),
        pytest.param(2, "elsewhere", "Hint: all ranks must make the same", marks=pytest.mark.slow),
        pytest.param(0, "elsewhere", "Hint: all ranks must make the same", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ranks_of_several_nodes_that_wait_in_vain_are_named_by_all_launchers(
    start_node: StartNode, script: Script, rank: int, what: str, said: str
) -> None:
    name = script(HANGS)
    limit = 12 if what == "asleep" else 60
    options = [f"--collective-timeout-s={limit}", name, str(rank), what]
    for code, out, err in ends([start_node(n, *options, nodes=3) for n in range(3)]):
        assert code == (137 if what in ("asleep", "killed") else 1), err
        assert re.search(said, err.splitlines()[-1]), err
        assert what in ("returns", "killed") or "most recent call first" in out + err


def test_when_the_launcher_of_node_0_is_killed_the_others_end_and_name_it(
    start_node: StartNode, script: Script, tmp_path: Path
) -> None:
    launchers = [start_node(n, "--max-restarts=3", script(WAITS)) for n in range(2)]
    pids = wait_for([tmp_path / f"up-{rank}-0" for rank in range(2)], launchers)
    launchers[0].kill()
    ((code, _, err),) = ends(launchers[1:])
    assert code == 137
    assert "The launcher of node 0 was lost: its connection was closed" in err
    assert_ended(pids)


@pytest.mark.long
def test_launchers_that_never_come_are_named(start_node: StartNode, script: Script) -> None:
    options = ["--nodes-timeout-s=3", script(WAITS)]
    first = start_node(0, *options, nodes=3)
    ((code, _, err),) = ends([first])
    assert code == 2
    assert "of all 3 nodes must come within 3 s, but there is none of node 1, 2." in err
    last = start_node(2, *options, nodes=3)
    ((code, _, err),) = ends([last])
    assert code == 137
    assert "The launcher of node 0 was lost: it was not reached within 3 s" in err


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--max-restarts=2", "`--max-restarts` must be the same on all nodes, but is 2 on node 1"),
        ("--nproc-per-node=2", "`--nproc-per-node` must be the same on all nodes, but is 2"),
    ],
)
def test_nodes_with_other_options_are_refused_by_their_names(
    start_node: StartNode, script: Script, option: str, text: str
) -> None:
    name = script(WAITS)
    options = ["--nproc-per-node=1", "--max-restarts=1"]
    first = start_node(0, *options, name)
    ((code, _, err),) = ends([start_node(1, *options, option, name)])
    assert code == 2
    assert text in err
    first.terminate()
    ((code, _, err),) = ends([first])
    assert code == 128 + signal.SIGTERM


@pytest.mark.long
def test_a_node_0_that_is_not_reached_is_told_while_it_is_waited_for(
    master_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_launch_nodes, "_TELL_AFTER_S", 0.0)
    nodes = _launch_nodes.LaunchNodes(
        2,
        ("127.0.0.1", master_port),
        {},
        lambda *_: False,
        heartbeat_timeout_s=30,
        collective_timeout_s=30,
        wait_s=5,
    )
    messages: SimpleQueue[Any] = SimpleQueue()
    nodes.open(messages.put)
    lost = messages.get(timeout=60)
    nodes.close(None)
    [told] = [one.getMessage() for one in caplog.records]
    assert told.startswith(f"Node 2 does not reach node 0 at 127.0.0.1:{master_port} yet")
    assert "Connection refused. Hint:" in told
    assert "was not reached within 5 s" in lost.failure.text


@pytest.mark.parametrize(
    "ranks",
    [
        7, [7], ["abcdefghi"], [[1, False]], [[1, False, [1.0] * 5]], [[1, False, ["x"] * 6]],
        [[None, False, [1.0, True, "barrier", 3, "train.py:1 in f", 1.0]]],
    ],
)  # fmt: skip
def test_a_launcher_that_tells_nonsense_of_its_ranks_is_lost_and_harms_nobody(
    master_port: int, ranks: Any
) -> None:
    address, options = ("127.0.0.1", master_port), {"--nnodes": 2, "launcher protocol": PROTOCOL}
    first = _launch_nodes.LaunchNodes(
        0,
        address,
        {"--nnodes": 2},
        lambda *_: RestartDecision(False, ""),
        heartbeat_timeout_s=30,
        collective_timeout_s=30,
        wait_s=60,
    )
    messages: SimpleQueue[NodeMessage] = SimpleQueue()
    first.open(messages.put)
    with socket.create_connection(address) as end:
        channel = BlockingChannel(end, LONGEST_BYTES)
        hello = NodeMessage(word=NodeMessageKind.HELLO, node_rank=1, options=options)
        channel.send(hello.frame())
        assert messages.get(timeout=60).word == NodeMessageKind.START
        channel.send(NodeMessage(word=NodeMessageKind.PROGRESS, ranks=ranks).frame())
        assert messages.get(timeout=60).word == NodeMessageKind.END
        first.tell_ended(0, (), {})
        verdict = messages.get(timeout=60)
    first.close(None)
    assert verdict.failure is not None
    assert "The launcher of node 1 was lost: it sent what is no message" in verdict.failure.text
