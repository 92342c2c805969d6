"""Files of pools, how many runners a need wants, and what a pool asks of its starter."""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import paceline
from paceline._cluster.master.executors import STARTERS
from paceline._cluster.master.scheduling.pools import PoolNeed
from paceline._cluster.master.starters import pool_runners as _starter_registry
from paceline._cluster.master.starters.pool_runners import (
    PoolDefinition,
    PoolRunners,
    missing_runners,
    read_pool_file,
    runner_groups,
)
from paceline._cluster.master.starters.slurm_ssh_ray_starters import (
    RunnerOrder,
    Starter,
    StarterError,
)
from paceline._cluster.messages.runner_messages import PROTOCOL, MasterAddress, NodeFacts, NodePoll
from paceline.config import ConfigError
from paceline.config._fields_and_problems import Section

FILE = """
pools:
  boxes:
    starter: ssh
    max_runners: 2
    options: {hosts: [box1, me@box2]}
  gpu:
    starter: slurm
    slots: 4
    options: {partition: gpu, gpus_per_node: 4, signal_before: 60}
"""


def test_a_file_gives_pools_and_their_starters(tmp_path: Path) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(FILE)
    pools = read_pool_file(path, "cluster")
    assert [(name, pool.max_runners, pool.slots) for name, (pool, _) in pools.items()] == [
        ("boxes", 2, None),
        ("gpu", 1, 4),
    ]
    assert pools["boxes"][1].new_name({"boxes-box1"}) == "boxes-me-box2"
    assert pools["boxes"][1].new_name({"boxes-box1", "boxes-me-box2"}) is None


def test_the_files_of_the_guide_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline._cluster.master.starters import pool_runners as _pool_file

    # Its packages need not be installed here.
    monkeypatch.setattr(_pool_file, "find_spec", lambda name: name)
    guide = Path(__file__).parents[3] / "docs" / "clusters.md"
    starters = []
    for block in re.findall(r"```yaml\n(pools:.*?)```", guide.read_text(), re.DOTALL):
        path = tmp_path / "pools.yaml"
        path.write_text(block)
        starters += [pool.starter for pool, _ in read_pool_file(path, "cluster").values()]
    assert sorted(starters) == ["kubernetes", "ray", "slurm", "ssh"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pools: {a: {starter: pbs}}",
            r"pools\.a: `starter` must be kubernetes, ray, slurm, ssh, but got 'pbs'",
        ),
        ("pools: {a: {}}", r"pools\.a\.starter: Field required"),
        ("pools: {a: {starter: ssh}}", r"pools\.a\.options\.hosts: Field required"),
        ("pools: {a: {starter: slurm, slot: 3}}", r"pools\.a\.slot: Extra inputs"),
        ("pools: {a: {starter: slurm, options: {signal_before: 0}}}", r"options\.signal_before"),
        (
            "pools: {a: {starter: slurm, options: {time_limit: '2'}}}",
            r"`time_limit` must be longer than `signal_before` \(120 s\).* got '2', which is 120 s",
        ),
        ("pools: {a: {starter: ray}}", r"pools\.a\.options\.: .*either `address` or `start: true`"),
        (
            "pools: {a: {starter: ray, options: {address: 'ray://head:10001'}}}",
            r"such as head:6379, but got that of a Ray client \(ray://head:10001\)",
        ),
        ("pools: {'a b': {starter: slurm}}", r"a b"),
        ("pools: {a: {starter: ssh, options: {hosts: ['-oProxyCommand=x']}}}", r"hosts\.0"),
    ],
)
def test_a_wrong_file_is_refused_by_path(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "pools.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_pool_file(path, "cluster")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_pool_file(tmp_path / "none.yaml", "cluster")


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ((), []),
        ((1,), [1]),
        ((1, 1, 2), [1]),
        ((3, 2), [1, 1]),
        ((8,), [2]),
        ((9, 1), [3, 1]),
    ],
)
def test_as_many_runners_as_the_trials_fit_on(sizes: tuple[int, ...], groups: list[int]) -> None:
    assert runner_groups(PoolNeed(sizes=sizes), 4) == groups


@pytest.mark.parametrize(
    ("num_idle", "starting", "missing", "awaited"),
    [
        (0, {}, [2, 1, 3], set()),
        (1, {}, [1, 1, 3], set()),
        (4, {}, [2], set()),
        (9, {}, [], set()),
        # Those that wait one by one might never be there at once.
        (0, {"a": 1, "b": 1}, [2, 3], {"a"}),
        (0, {"a": 2, "b": 4}, [], {"a", "b"}),
        (0, {"a": 3}, [3], {"a"}),
        (1, {"a": 1, "b": 2}, [3], {"a", "b"}),
    ],
)
def test_the_runners_of_a_group_are_idle_or_start_together(
    num_idle: int, starting: dict[str, int], missing: list[int], awaited: set[str]
) -> None:
    assert missing_runners([2, 1, 3], num_idle, starting) == (missing, awaited)


class NotedStarter(Starter):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__("p", "cluster", "~/runners", Section())
        self.orders: list[RunnerOrder] = []
        self.groups: list[int] = []
        self.jobs: dict[str, bool] = {}
        self.fails = False
        self.waiting: str | None = None

    def start(self, order: RunnerOrder) -> None:
        if self.fails:
            raise StarterError("no room")
        self.orders.append(order)
        self.jobs[order.name] = False

    def start_group(self, orders: Sequence[RunnerOrder]) -> None:
        super().start_group(orders)
        self.groups.append(len(orders))

    def runners(self) -> dict[str, bool]:
        return dict(self.jobs)

    def why_waiting(self) -> str | None:
        return self.waiting

    def cancel(self, name: str) -> None:
        del self.jobs[name]


@pytest.fixture
def starter() -> NotedStarter:
    return NotedStarter()


@pytest.fixture
def served(make_master: Any) -> Any:
    return make_master(num_slots=0)


@pytest.fixture
def runners(served: Any, starter: NotedStarter) -> PoolRunners:
    """Return the runners of a pool of two slots a runner, three runners at most."""
    master = served.core
    definition = PoolDefinition(starter="noted", slots=2, max_runners=3)
    master.pool_runners = PoolRunners(
        {"p": (definition, starter)}, master.nodes, master.tokens, dict,
        MasterAddress(url="https://head:1", certificate="PEM"),
    )  # fmt: skip
    return master.pool_runners


def usable(runners: PoolRunners) -> list[str]:
    return [token.name for token in runners._tokens.list() if not token.is_revoked]


def register(runners: PoolRunners, name: str, token_id: int | None = None) -> None:
    facts = NodeFacts(
        name=name, key="k", version=paceline.__version__, protocol=PROTOCOL, python="python3",
        python_version="3", devices=["cpu", "cpu"], device_kind="cpu", num_cores=2,
        memory_bytes=1, pool="p",
    )  # fmt: skip
    runners._nodes.register(facts, token_id).result()


def test_a_need_starts_runners_once_and_up_to_the_limit(
    runners: PoolRunners, starter: NotedStarter
) -> None:
    need = PoolNeed(sizes=(1, 1, 2))
    runners._look_after("p", need)
    runners._look_after("p", need)
    assert len(starter.orders) == 2
    runners._look_after("p", PoolNeed(sizes=(2,) * 10))
    assert len(starter.orders) == 3
    secrets = {order.token for order in starter.orders}
    assert len(secrets) == 3
    assert [(one.name, one.node, one.pool) for one in runners._tokens.list()] == [
        (f"runner {order.name}", order.name, "p") for order in reversed(starter.orders)
    ]
    for order in starter.orders:
        assert order.certificate == "PEM"
        words = f"{' '.join(order.command)} {order!r}"
        assert "https://head:1" in words
        assert order.token not in words
        assert order.node_key not in words


def test_runners_of_one_trial_are_started_together_up_to_the_limit(
    runners: PoolRunners, starter: NotedStarter
) -> None:
    runners._look_after("p", PoolNeed(sizes=(4, 2, 2)))
    assert starter.groups == [2, 1]


def test_a_group_is_never_started_in_part_but_others_make_room_for_it(
    runners: PoolRunners, starter: NotedStarter
) -> None:
    runners._look_after("p", PoolNeed(sizes=(2, 2)))
    runners._look_after("p", PoolNeed(sizes=(4, 4)))
    # Two single runners wait, and there may be three.
    assert starter.groups == [1, 1]
    assert starter.jobs == {}
    runners._look_after("p", PoolNeed(sizes=(4, 4)))
    runners._look_after("p", PoolNeed(sizes=(4, 4)))
    assert starter.groups == [1, 1, 2]
    assert len(starter.jobs) == 2


def test_a_runner_that_waits_again_is_not_asked_for_once_more(
    runners: PoolRunners, starter: NotedStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners._look_after("p", PoolNeed(sizes=(2,)))
    [name] = starter.jobs
    starter.jobs[name] = True
    present = {name: False}
    monkeypatch.setattr(runners, "_present", lambda _: present)
    runners._look_after("p", None)
    # It was preempted.
    present.clear()
    starter.jobs[name] = False
    runners._look_after("p", PoolNeed(sizes=(2,)))
    assert len(starter.orders) == 1


def test_runners_that_wait_for_no_trial_are_canceled_and_others_are_left(
    runners: PoolRunners, starter: NotedStarter
) -> None:
    runners._look_after("p", PoolNeed(sizes=(2, 2)))
    first, second = starter.jobs
    starter.jobs[first] = True
    runners._look_after("p", None)
    assert list(starter.jobs) == [first]
    runners._look_after("p", None)
    assert usable(runners) == [f"runner {first}"]
    assert second not in starter.jobs


def test_the_token_of_a_runner_that_has_ended_is_revoked_and_another_one_comes(
    runners: PoolRunners, starter: NotedStarter
) -> None:
    runners._look_after("p", PoolNeed(sizes=(2,)))
    starter.jobs.clear()
    runners._starting["p"] = {name: time.monotonic() - 1 for name in runners._starting["p"]}
    runners._look_after("p", PoolNeed(sizes=(2,)))
    assert len(starter.orders) == 2
    runners._look_after("p", PoolNeed(sizes=(2,)))
    assert usable(runners) == [f"runner {starter.orders[1].name}"]


def test_a_runner_that_has_left_loses_its_token_though_its_starter_tells_of_none(
    runners: PoolRunners, starter: NotedStarter
) -> None:
    starter.knows_all = False
    runners._look_after("p", PoolNeed(sizes=(2,)))
    [name] = starter.jobs
    [token] = runners._tokens.list()
    register(runners, name, token.id)
    [node] = runners._nodes.all()
    poll = NodePoll(key="k", session=1, number=1, attempts=[], alive=[])
    for is_leaving, kept in ((False, [f"runner {name}"]), (True, [])):
        poll = msgspec.structs.replace(poll, number=poll.number + 1, is_leaving=is_leaving)
        runners._nodes.hear(node.id, poll, token.id)
        runners._look_after("p", None)
        assert usable(runners) == kept


def test_a_runner_that_leaves_keeps_its_token_until_it_has_left(
    runners: PoolRunners, starter: NotedStarter
) -> None:
    runners._look_after("p", PoolNeed(sizes=(2,)))
    [name] = starter.jobs
    register(runners, name)
    [node] = [node for node in runners._nodes.all() if node.name == name]
    poll = NodePoll(key="k", session=1, number=1, attempts=[7], alive=[7], is_leaving=True)
    runners._nodes.hear(node.id, poll, None)
    # Its job is gone, and its attempt stores a checkpoint.
    starter.jobs.clear()
    runners._look_after("p", None)
    assert usable(runners) == [f"runner {name}"]
    runners._nodes.hear(node.id, msgspec.structs.replace(poll, number=2, attempts=[]), None)
    runners._look_after("p", None)
    assert usable(runners) == []


def test_a_runner_that_leaves_is_not_taken_for_one_that_starts(
    runners: PoolRunners, starter: NotedStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners._look_after("p", PoolNeed(sizes=(2,)))
    [name] = starter.jobs
    starter.jobs[name] = True
    present = {name: True}
    monkeypatch.setattr(runners, "_present", lambda _: present)
    runners._look_after("p", None)
    # Its job has not ended yet.
    present.clear()
    runners._look_after("p", PoolNeed(sizes=(2,)))
    assert len(starter.orders) == 2


@pytest.mark.parametrize("knows_all", [True, False])
def test_a_runner_that_has_come_and_left_between_two_looks_is_not_waited_for(
    runners: PoolRunners, starter: NotedStarter, knows_all: bool
) -> None:
    starter.knows_all = knows_all
    runners._look_after("p", PoolNeed(sizes=(2,)))
    [name] = starter.jobs
    # It takes no attempts before its first poll, as one that leaves takes none.
    register(runners, name)
    starter.jobs = {name: True} if knows_all else {}
    runners._look_after("p", PoolNeed(sizes=(2,)))
    assert len(starter.orders) == 2


def next_master(runners: PoolRunners) -> PoolRunners:
    """Return what a master that was started again has for the same pools, nodes and tokens."""
    return PoolRunners(
        runners._pools, runners._nodes, runners._tokens, dict, MasterAddress(url="https://head:1")
    )


def test_the_next_master_does_not_wait_for_a_runner_that_has_come_and_leaves(
    runners: PoolRunners, starter: NotedStarter
) -> None:
    need = PoolNeed(sizes=(2,))
    runners._look_after("p", need)
    [name] = starter.jobs
    register(runners, name)
    starter.jobs[name] = True
    # Its cluster tells of it while it leaves.
    runners = next_master(runners)
    runners._look_after("p", need)
    assert len(starter.orders) == 2
    assert (
        runners.describe_starting("p") == f"1 runner ({starter.orders[1].name}) has not joined yet."
    )


def test_the_next_master_waits_for_a_runner_that_was_started_until_it_is_gone(
    runners: PoolRunners, starter: NotedStarter
) -> None:
    need = PoolNeed(sizes=(2,))
    runners._look_after("p", need)
    [name] = starter.jobs
    # A node of this name that an earlier runner was.
    for token in runners._tokens.list():
        runners._tokens.revoke(token.id).result()
    register(runners, name)
    starter.jobs[name] = True
    runners = next_master(runners)
    for _ in range(2):
        runners._look_after("p", need)
        assert runners.describe_starting("p") == f"1 runner ({name}) has not joined yet."
    del starter.jobs[name]
    runners._look_after("p", need)
    assert len(starter.orders) == 2
    assert name not in (runners.describe_starting("p") or "")


def test_a_starter_that_fails_is_told_and_rests(
    runners: PoolRunners, starter: NotedStarter, caplog: pytest.LogCaptureFixture
) -> None:
    starter.fails = True
    for _ in range(3):
        runners._look_after("p", PoolNeed(sizes=(2,)))
    assert [record.getMessage() for record in caplog.records] == ["Pool p: no room"]


def detail_of(served: Any, name: str = "p") -> str | None:
    [pool] = [one for one in served.http.get("/pools").json() if one["name"] == name]
    detail: str | None = pool["detail"]
    return detail


def test_a_pool_without_nodes_says_what_it_waits_for(
    served: Any,
    runners: PoolRunners,
    starter: NotedStarter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served.http.put("/pools/by-hand", json={})
    assert detail_of(served, "by-hand") == (
        "No node has joined it. Hint: paceline runner --pool by-hand"
    )
    assert detail_of(served) == (
        "The master starts up to 3 runner(s) for it by `noted` when trials of the pool wait."
    )
    need = PoolNeed(sizes=(4,))
    runners._look_after("p", need)
    first, second = sorted(starter.jobs)
    assert detail_of(served) == f"2 runners ({first}, {second}) have not joined yet."
    starter.waiting = "The cluster is full."
    runners._look_after("p", need)
    assert detail_of(served) == (
        f"2 runners ({first}, {second}) have not joined yet. The cluster is full."
    )
    present = {first: True}
    monkeypatch.setattr(runners, "_present", lambda _: present)
    register(runners, first)
    runners._look_after("p", need)
    assert detail_of(served) == f"1 runner ({second}) has not joined yet. The cluster is full."
    present[second] = True
    register(runners, second)
    runners._look_after("p", need)
    assert detail_of(served) is None


def reasons(served: Any) -> list[str]:
    return [entry["detail"] for entry in served.http.get("/queue").json()]


def test_a_waiting_trial_says_what_its_runner_waits_for(
    served: Any, runners: PoolRunners, starter: NotedStarter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    served.create(resources={"pool": "p"})
    served.schedule()
    starter.waiting = "The cluster is full."
    for _ in range(3):
        runners._look_after("p", PoolNeed(sizes=(1,)))
    [name] = starter.jobs
    assert reasons(served)[0].endswith(f"({name}) has not joined yet. The cluster is full.")
    told = [record.getMessage() for record in caplog.records]
    assert told.count("Pool p: The cluster is full.") == 1
    starter.waiting = None
    runners._look_after("p", PoolNeed(sizes=(1,)))
    assert "The cluster is full" not in reasons(served)[0]


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "never-registers"])
def test_a_waiting_trial_says_why_its_pool_has_no_runner_until_there_is_one(
    served: Any, runners: PoolRunners, starter: NotedStarter, is_refused: bool
) -> None:
    starter.knows_all = False
    starter.fails = is_refused
    served.create(resources={"pool": "p"})
    served.schedule()
    need = PoolNeed(sizes=(1,))
    runners._look_after("p", need)
    if is_refused:
        why = "No runner could be started for it: no room"
    else:
        [(name, _)] = starter.jobs.items()
        starter.jobs.clear()
        assert f"The runner {name}" not in reasons(served)[0]
        runners._starting["p"][name] = time.monotonic() - 1
        runners._look_after("p", None)
        why = (
            f"The runner {name} was started, but has not registered within 60 s. Hint: it must"
            " reach the master at https://head:1 (`url` of the pool). Look at"
            f" {starter.log_of(name)}."
        )
    assert why in reasons(served)[0]
    assert ("No runner could" in reasons(served)[0]) == is_refused
    [pool] = [one for one in served.http.get("/pools").json() if one["name"] == "p"]
    assert pool["failure"] == why

    starter.fails = False
    runners._rest_until["p"] = 0.0
    runners._look_after("p", need)
    if is_refused:
        assert "No runner could" not in reasons(served)[0]
        assert "1 runner " in reasons(served)[0]
    else:
        # It may fail as well.
        assert why in reasons(served)[0]
    register(runners, next(iter(starter.jobs)))
    runners._look_after("p", need)
    assert why not in reasons(served)[0]


def test_a_failure_is_shown_until_a_pass_goes_well(
    runners: PoolRunners, starter: NotedStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster may not have answered for a moment, when nothing had to be started."""

    def fail() -> dict[str, bool]:
        raise StarterError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(starter, "runners", fail)
        runners._look_after("p", None)
    for _ in range(2):
        # The pool rests first.
        assert runners.failure("p") == "No runner could be started for it: no answer"
        runners._look_after("p", None)
    runners._rest_until["p"] = 0.0
    runners._look_after("p", None)
    assert runners.failure("p") is None


def test_a_runner_that_registers_late_ends_the_failure_that_names_it(
    runners: PoolRunners, starter: NotedStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter.knows_all = False
    runners._look_after("p", PoolNeed(sizes=(1,)))
    [name] = starter.jobs
    starter.jobs.clear()
    runners._starting["p"][name] = time.monotonic() - 1
    runners._look_after("p", None)
    assert "has not registered" in (runners.failure("p") or "")
    register(runners, name)
    monkeypatch.setattr(runners, "_present", lambda _: {name: True})
    runners._look_after("p", None)
    assert runners.failure("p") is None


@pytest.mark.parametrize(
    ("kind", "options", "name", "place"),
    [
        ("ssh", {"hosts": ["me@box"]}, "p-me-box", "~/runners/p-me-box/runner.log on me@box"),
        ("slurm", {}, "p-1a2b3c", str(Path.home() / "runners/p-1a2b3c/runner.log")),
        ("slurm", {}, "p-1a2b3c.2", str(Path.home() / "runners/p-1a2b3c.0/job.log")),
    ],
)
def test_the_log_of_a_runner_can_be_found(
    tmp_path: Path, kind: str, options: dict[str, Any], name: str, place: str
) -> None:
    path = tmp_path / "pools.yaml"
    pool = {"starter": kind, "directory": "~/runners", "options": options}
    path.write_text(json.dumps({"pools": {"p": pool}}))
    assert read_pool_file(path, "cluster")["p"][1].log_of(name) == place


def test_executors_send_who_names_a_starter_to_pools() -> None:
    assert set(STARTERS) == _starter_registry._OWN.keys()
