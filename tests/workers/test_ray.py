"""Pools on a Ray cluster of real nodes, which all run on this machine."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest

from paceline._training.workers import shared_memory as _shared_memory_segment
from paceline._training.workers.channels import Listener, join_listener
from paceline._training.workers.processes.worker_output import OutputLine
from paceline._training.workers.ray import cluster as _ray_node_versions
from paceline._training.workers.ray import placement as _ray_placement
from paceline._training.workers.ray.cluster import (
    import_ray,
    make_token_private,
    num_fitting,
    version_differences,
)
from paceline._training.workers.ray.pool import RayPool
from paceline._training.workers.ray.script_sources import (
    pack_script_directory,
    script_directory_mark,
    unpack_script_directory,
)
from paceline._training.workers.worker_failures import (
    NodesDifferError,
    PlacementTimeoutError,
    RemoteTraceback,
    ResourcesError,
    WorkerFailedError,
)

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WaitUntil = Callable[[Callable[[], object]], None]


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to Ray, which starts some at its first use."""


@pytest.fixture(autouse=True)
def no_leaked_signal_handlers() -> None:
    """Leave SIGTERM to Ray's nodes, which set it in this process."""


@pytest.fixture
def printed() -> list[OutputLine]:
    """Collect what the workers of `pool` print."""
    return []


@pytest.fixture
def pool(ray_cluster: Any, printed: list[OutputLine]) -> Iterator[RayPool]:
    """Return a started pool of two workers, one on each node."""
    with RayPool(
        2, strategy="STRICT_SPREAD", on_line=printed.append, grace_s=1.0, heartbeat_timeout_s=10.0
    ) as pool:
        yield pool


def place() -> dict[str, str]:
    print("hello")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
    return {name: os.environ[name] for name in names}


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("on purpose")
    time.sleep(600)


def kill_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.long
def test_workers_on_two_nodes_act_like_those_on_one(
    pool: RayPool,
    printed: list[OutputLine],
    monkeypatch: pytest.MonkeyPatch,
    wait_until: WaitUntil,
) -> None:
    first, second = pool.submit(place).wait() or []
    assert first == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert second == {**first, "RANK": "1", "NODE_RANK": "1"}
    assert pool.submit(os.getpid).wait() == [process.pid for process in pool.processes]
    assert pool.submit(bytes, (5_000_000,), ranks=[1]).wait() == [bytes(5_000_000)]
    assert pool.capacity() == 4

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        pool.submit(fail_on_rank_1).wait()
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "Rank 1 raised, the first of 2 to fail" in str(caught.value.__cause__)

    pool.start()
    pids = [process.pid for process in pool.processes]
    with pytest.raises(WorkerFailedError, match="Rank 1 was ended by SIGKILL") as lost:
        pool.submit(kill_rank_1).wait()
    assert lost.value.rank == 1
    assert pool.capacity() == 4

    pool.start(1)
    assert pool.submit(place).wait() == [{**first, "WORLD_SIZE": "1"}]
    pool.shutdown()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))
    assert sorted((line.rank or 0, line.text) for line in printed) == [
        (0, "hello"),
        (0, "hello"),
        (1, "hello"),
    ]

    with pytest.raises(ResourcesError, match=r"3 worker\(s\) with 1 CPU, 1 memory_bank each need"):
        RayPool(3, resources_per_worker={"memory_bank": 1}).start()
    monkeypatch.setattr(
        _ray_node_versions, "own_versions", lambda: {"Python": "3.4.1", "torch": "0.1"}
    )
    with pytest.raises(NodesDifferError, match=r"node 127\.0\.0\.1 has Python .* instead of 3\.4"):
        pool.start(1)


def asked_for(name: str) -> float:
    """Return how much of a resource of Ray its autoscaler is asked for."""
    from ray._private.worker import global_worker
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    state = get_cluster_resource_state(global_worker.gcs_client)
    single = [(one.request, one.count) for one in state.pending_resource_requests]
    grouped = [(one, 1) for group in state.pending_gang_resource_requests for one in group.requests]
    return sum(one.resources_bundle.get(name, 0.0) * number for one, number in single + grouped)


@pytest.mark.long
def test_an_autoscaler_is_asked_for_the_nodes_of_workers_without_room(
    ray_cluster: Any, wait_until: WaitUntil
) -> None:
    def add_node() -> Any:
        # As of a launcher. Nobody else adds nodes here.
        variables = {"RAY_NODE_TYPE_NAME": "small"}
        return ray_cluster.add_node(num_cpus=1, resources={"grown": 1}, env_vars=variables)

    nodes = [add_node()]
    pool = RayPool(2, resources_per_worker={"grown": 1})
    with ThreadPoolExecutor() as thread, ExitStack() as stack:
        stack.callback(pool.shutdown)
        start = thread.submit(pool.start)
        wait_until(lambda: asked_for("grown") == 2)
        nodes.append(add_node())
        start.result()
        assert pool.submit(os.getpid).wait() == [process.pid for process in pool.processes]
        for _ in range(2):
            pool.request(3)
        wait_until(lambda: asked_for("grown") == 1)
        assert (pool.capacity(), pool.reserve(3)) == (2, 2)
        pool.cancel_reservation()
        wait_until(lambda: asked_for("grown") == 0)
    for node in nodes:
        ray_cluster.remove_node(node, allow_graceful=False)


CLIENT = """
from paceline import train
for cluster in ("auto", "ray", "ray://127.0.0.1:1"):
    try:
        train.Trainer(num_workers=1, cluster=cluster)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_an_address_of_ray_clients_is_refused_at_once(run_python: Callable[..., Any]) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("NOT TESTED: Ray is not installed")
    done = run_python(CLIENT, RAY_ADDRESS="ray://127.0.0.1:1")
    auto, ray, address = done.stdout.splitlines()
    assert auto == ray
    assert auto.startswith("NotOfferedError A driver of workers on Ray must run on a node of the")
    assert "but RAY_ADDRESS is 'ray://127.0.0.1:1', which is for Ray clients. Hint: start" in auto
    assert address.startswith("ValueError `cluster` must be one of 'auto', 'local', 'ray', but got")
    assert 'Hint: cluster="ray" takes the Ray cluster that RAY_ADDRESS names' in address


def test_missing_ray_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'paceline\[ray\]'"):
        import_ray()


def test_bundles_are_counted_by_node() -> None:
    nodes = [{"CPU": 3.0}, {"CPU": 3.0, "GPU": 1.0}]
    assert num_fitting(nodes, {"CPU": 2.0}) == 2
    assert num_fitting(nodes, {"CPU": 1.0, "GPU": 0.5}) == 2
    assert num_fitting(nodes, {"CPU": 1.0, "TPU": 1.0}) == 0
    assert num_fitting(nodes, {"CPU": 0.0}) == sys.maxsize


def test_versions_differ_in_what_must_agree() -> None:
    own = {"Python": "3.11.7", "torch": "2.13.0+cpu"}
    assert version_differences(own, {"Python": "3.11.9", "torch": "2.13.0+cu130"}) == []
    assert version_differences(own, {"Python": "3.12.1"}) == [
        "Python 3.12.1 instead of 3.11.7",
        "torch none instead of 2.13.0+cpu",
    ]


def test_only_who_knows_the_key_is_admitted() -> None:
    listener = Listener("127.0.0.1")
    command = (
        "import sys;"
        "from paceline._training.workers.channels import ListenerAddress, join_listener;"
        "address = ListenerAddress('127.0.0.1', int(sys.argv[1]));"
        "join_listener(address, bytes.fromhex(sys.argv[2]), 'guest')"
    )

    def visit(key: bytes) -> "subprocess.Popen[bytes]":
        port = str(listener.address.port)
        return subprocess.Popen(
            [sys.executable, "-c", command, port, key.hex()], stderr=subprocess.DEVNULL
        )

    stranger = visit(bytes(32))
    assert listener.accept(120.0) is None
    assert stranger.wait(120) != 0
    friend = visit(listener.key)
    met = listener.accept(120.0)
    assert met is not None
    assert met[0] == "guest"
    assert friend.wait(120) == 0
    met[1].close()
    listener.close()
    with pytest.raises(ConnectionError, match=r"must be reachable at 127\.0\.0\.1"):
        join_listener(listener.address, listener.key, "late")


def test_only_the_same_files_count_as_the_directory_of_the_driver(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "module.py").write_text("X = 1")
    mark = script_directory_mark(str(first))
    shutil.copytree(first, second)
    (first / "written_meanwhile").touch()
    assert script_directory_mark(str(first)) == mark
    assert script_directory_mark(str(second)) != mark
    (first / "module.py").write_text("X = 12")
    assert script_directory_mark(str(first)) != mark
    assert script_directory_mark(str(tmp_path / "missing")) is None


def test_sources_travel_without_what_is_made_from_them(tmp_path: Path) -> None:
    (tmp_path / "package" / "__pycache__").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("X = 1")
    (tmp_path / "package" / "__pycache__" / "x.pyc").write_text("")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    copy = Path(unpack_script_directory(pack_script_directory(str(tmp_path))))
    assert [path.relative_to(copy) for path in copy.rglob("*.*")] == [Path("package/__init__.py")]


@pytest.mark.slow
def test_a_stopped_worker_and_a_lost_actor_are_noticed(
    pool: RayPool, wait_until: WaitUntil
) -> None:
    call = pool.submit(time.sleep, (600,))
    os.kill(pool.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(WorkerFailedError, match=r"Rank 0 is stopped \(SIGSTOP\): it gave no sign"):
        call.wait(240)
    pool.start()
    call = pool.submit(time.sleep, (600,))
    worker = psutil.Process(pool.processes[1].pid)
    actor = next(p for p in worker.parents() if "PacelineWorker" in p.name() or "ray::" in p.name())
    actor.kill()
    with pytest.raises(WorkerFailedError, match="Rank 1 was lost with its node 127"):
        call.wait(240)
    wait_until(lambda: not worker.is_running())
    pool.start()
    assert pool.submit(os.getpid).wait() == [process.pid for process in pool.processes]


@pytest.mark.slow
def test_data_of_the_driver_are_shared_on_its_machine_and_sent_to_others(
    pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.arange(3 << 20)

    def use(data: Any) -> tuple[int, bool]:
        data[0] = 7
        return int(data.sum()), "memfd:paceline" in Path("/proc/self/maps").read_text()

    expected = int(data.sum()) + 7
    assert pool.submit(use, (data,)).wait() == [(expected, True)] * 2
    monkeypatch.setattr(_shared_memory_segment, "_machine", lambda: "another machine")
    data[1] = 10
    assert pool.submit(use, (data,)).wait() == [(expected + 9, False)] * 2
    assert data[0] == 0


@pytest.mark.slow
def test_a_lost_node_is_replaced_by_others(ray_cluster: Any) -> None:
    node = ray_cluster.add_node(num_cpus=1, resources={"far": 1})
    with RayPool(1, resources_per_worker={"far": 1}, grace_s=1.0) as pool:
        call = pool.submit(time.sleep, (600,))
        ray_cluster.remove_node(node, allow_graceful=False)
        with pytest.raises(WorkerFailedError, match="Rank 0 was lost with its node"):
            call.wait(240)
        ray_cluster.add_node(num_cpus=1, resources={"far": 1})
        pool.start()
        assert pool.submit(os.getpid).wait() == [pool.processes[0].pid]


@pytest.mark.slow
def test_a_wait_for_a_node_that_replaces_a_lost_one_is_told(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # By then Ray knows that the other worker has ended, also on a busy machine.
    monkeypatch.setattr(_ray_placement, "_TELL_WAIT_S", 3.0)
    nodes = [ray_cluster.add_node(num_cpus=1, resources={"few": 1}) for _ in range(2)]
    try:
        with RayPool(2, resources_per_worker={"few": 1}, grace_s=1.0) as pool:
            call = pool.submit(time.sleep, (600,))
            ray_cluster.remove_node(nodes.pop(), allow_graceful=False)
            with pytest.raises(WorkerFailedError, match="was lost with its node"):
                call.wait(240)
            pool.placement_timeout_s = 10.0
            with pytest.raises(PlacementTimeoutError, match="2 worker.* within 10 s"):
                pool.start()
        told = "1 of 2 workers are there; the others wait for up to 10 s for 1 CPU, 1 few each."
        assert caplog.text.count(told) == 1
    finally:
        for node in nodes:
            ray_cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reserve_that_still_loads_is_used_when_all_workers_are_lost(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    go = tmp_path / "go"
    (tmp_path / "loads_for_long.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    added = [ray_cluster.add_node(num_cpus=1, resources={"spare": 1})]
    try:
        go.touch()
        with RayPool(
            1, resources_per_worker={"spare": 1}, preload=["loads_for_long"], grace_s=1.0
        ) as pool:
            go.unlink()
            added.append(ray_cluster.add_node(num_cpus=1, resources={"spare": 1}))
            wait_until(lambda: pool.capacity() == 2)
            call = pool.submit(time.sleep, (600,))
            assert pool.reserve(2) == 1
            reserve = pool._hosts()._actors.all[1]
            wait_until(lambda: pool.reserve(2) == 1 and reserve.facts)
            assert reserve.unheard
            ray_cluster.remove_node(added.pop(0), allow_graceful=False)
            with pytest.raises(WorkerFailedError, match="Rank 0 was lost with its node"):
                call.wait(240)
            # Ray itself may still count the lost one.
            assert pool.capacity() >= 1
            threading.Timer(1.0, go.touch).start()
            pool.start()
            assert reserve.has_worked
            assert pool.submit(os.getpid).wait() == [pool.processes[0].pid]
    finally:
        for node in added:
            ray_cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_start_on_no_node_that_is_drained(
    ray_cluster: Any, drain_node: Callable[[str], None]
) -> None:
    added = [ray_cluster.add_node(num_cpus=1, resources={"told": 1}) for _ in range(2)]
    nodes = {node.all_processes["raylet"][0].process.pid: node.node_id for node in added}

    def node_of(pool: RayPool) -> str:
        parents = psutil.Process(pool.processes[0].pid).parents()
        return next(nodes[process.pid] for process in parents if process.pid in nodes)

    try:
        with RayPool(1, resources_per_worker={"told": 1}, grace_s=1.0) as pool:
            first = node_of(pool)
            assert (pool.capacity(), list(pool.leaving_ranks())) == (2, [])
            drain_node(first)
            assert (pool.capacity(), list(pool.leaving_ranks())) == (1, [0])
            # The worker itself is left alone.
            assert node_of(pool) == first
            pool.stop(grace_s=0.0, is_restart=True)
            pool.start()
            (second,) = set(nodes.values()) - {first}
            assert node_of(pool) == second
            assert (pool.capacity(), list(pool.leaving_ranks())) == (1, [])
            drain_node(second)
            assert (pool.capacity(), list(pool.leaving_ranks())) == (0, [0])
            with pytest.raises(ResourcesError, match=r"without the \d that will be taken away"):
                RayPool(1, resources_per_worker={"told": 1}).start()
    finally:
        for node in added:
            ray_cluster.remove_node(node, allow_graceful=False)


def test_the_token_that_a_started_ray_has_is_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another one")
    path = tmp_path / ".ray" / "auth_token"
    make_token_private()
    assert not path.exists()
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    make_token_private()
    text = path.read_text()
    assert (len(text), path.stat().st_mode & 0o777, caplog.text) == (64, 0o600, "")
    # As Ray leaves one.
    path.chmod(0o644)
    make_token_private()
    assert (path.read_text(), path.stat().st_mode & 0o777) == (text, 0o600)
    assert "Others could read the token of Ray" in caplog.text


KILLED_DRIVER = """
import os, sys, time
from paceline._training.workers.ray.pool import RayPool
pool = RayPool(2)
pool.start()
import ray
import psutil
others = [p.pid for p in psutil.Process().children(recursive=True)]
connections = [c for pid in others for c in psutil.Process(pid).net_connections("tcp")]
listening = {c.laddr.ip.rpartition(":")[2] for c in connections if c.status == "LISTEN"}
# These of Ray's own look for the end of their node from time to time only.
late = [pid for pid in others if "Agent" in psutil.Process(pid).name()]
print(os.environ["RAY_AUTH_MODE"], ",".join(listening), len(late), *late, *others, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
pool.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "shutdown"])
def test_ray_that_is_started_here_ends_with_its_use(
    run_python: Callable[..., Any], wait_until: WaitUntil, tmp_path: Path, end: str
) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("NOT TESTED: Ray is not installed")
    result = run_python(KILLED_DRIVER, end, HOME=str(tmp_path))
    assert result.returncode == (-signal.SIGKILL if end == "kill" else 0), result.stderr
    mode, addresses, num_late, *numbers = result.stdout.split()
    assert (mode, addresses) == ("token", "127.0.0.1")
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    late, pids = set(numbers[: int(num_late)]), set(numbers[int(num_late) :])
    for pid in late if end == "kill" else ():
        os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: not [pid for pid in pids if psutil.pid_exists(int(pid))])


SHORT_OF_MEMORY = """
import time
from paceline._training.workers.ray.pool import RayPool
from paceline._training.workers.worker_failures import WorkerStartError
from paceline._training.workers.ray.hosts import log_lack_of_memory

pool = RayPool(1)
try:
    pool.start()
except WorkerStartError as error:
    print(error)
import ray

@ray.remote(num_cpus=0)
class Actor:
    def is_on_node(self):
        time.sleep(600)

log_lack_of_memory(ray, Actor.remote(), 3)
pool.shutdown()
"""


@pytest.mark.slow
def test_actors_that_ray_kills_for_lack_of_memory_are_told(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("NOT TESTED: Ray is not installed")
    # Any node uses so much.
    done = run_python(SHORT_OF_MEMORY, HOME=str(tmp_path), RAY_memory_usage_threshold="0.001")
    assert done.returncode == 0, done.stderr
    why = ", as its node is short of memory. Hint: fewer workers"
    # The first answer of the actor may come before its end.
    assert re.search(f"(must start, but|started:) Ray has killed (one|an actor){why}", done.stdout)
    assert f"Ray has killed the actor of rank 3{why}" in done.stderr
