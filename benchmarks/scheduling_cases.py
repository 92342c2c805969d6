"""What a decision of the scheduler costs, and runners that have nothing to do."""

import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from bench_cases import start_master
from figures import Figure
from scheduling_use import measure_use

_NUM_WAITING = 1000
_NUM_SLOTS = 500
_NUM_NODES = 2000
_NUM_EXPERIMENTS = 50
_ROUNDS = 9
_NUM_RUNNERS = 200
_IDLE_S = 60.0


def measure_scheduling() -> list[Figure]:
    """Decide on 1,000 waiting trials: 500 slots in use, all free, and all to be preempted."""
    from paceline._cluster.master.scheduling.pools import (
        Holding,
        NodeSlots,
        PolicyName,
        PoolSettings,
        Waiting,
    )
    from paceline._cluster.master.scheduling.schedule import schedule

    # Of 2,000 nodes 500 are free for the pool, with a slot each; the others are another pool's.
    nodes = [
        NodeSlots(node_id=n, slots=(0,), pool="default" if n <= _NUM_SLOTS else "other")
        for n in range(1, _NUM_NODES + 1)
    ]
    waiting = [
        Waiting(trial_id=n, experiment_id=n % _NUM_EXPERIMENTS, num_slots=1, max_slots=None)
        for n in range(_NUM_WAITING)
    ]
    held = [
        Holding(
            experiment_id=100 + n % _NUM_EXPERIMENTS, slots=(0,), node_id=n + 1, attempt_id=n + 1
        )
        for n in range(_NUM_SLOTS)
    ]
    less_important = [
        Holding(experiment_id=100, slots=(0,), node_id=n + 1, attempt_id=n + 1, priority=90)
        for n in range(_NUM_SLOTS)
    ]
    figures = []
    for policy in PolicyName:
        pools = {"default": PoolSettings(policy=policy)}
        for what, holding in (
            ("all slots in use", held),
            ("all slots free", []),
            ("all in use by others that make room", less_important),
        ):
            if policy is PolicyName.FIFO and holding is less_important:
                continue
            decision = partial(schedule, waiting, holding, nodes, pools)
            values = [_milliseconds(decision) for _ in range(_ROUNDS)]
            figures.append(
                Figure(
                    what=f"1,000 waiting, 500 slots, 2,000 nodes, {policy.value}, {what}",
                    unit="ms", values=values, bar=50,
                )
            )  # fmt: skip
    return figures + _measure_groups() + _measure_lab() + _measure_ticks()


def _measure_groups() -> list[Figure]:
    """The same with trials on several nodes of four slots: even, uneven and elastic ones."""
    from paceline._cluster.master.scheduling.pools import NodeSlots, Waiting
    from paceline._cluster.master.scheduling.schedule import schedule

    nodes = [
        NodeSlots(node_id=n, slots=(0, 1, 2, 3), can_join=True)
        for n in range(1, _NUM_SLOTS // 4 + 1)
    ]
    figures = []
    for what, num_slots, most_slots, allow_uneven in (
        ("8 slots each", 8, 8, False),
        ("7 slots each, uneven", 7, 7, True),
        ("2 to 64 slots each", 2, 64, False),
    ):
        waiting = [
            Waiting(
                trial_id=n, experiment_id=n % _NUM_EXPERIMENTS, num_slots=num_slots,
                most_slots=most_slots, allow_uneven=allow_uneven, max_slots=None,
            )
            for n in range(_NUM_WAITING)
        ]  # fmt: skip
        decision = partial(schedule, waiting, (), nodes)
        values = [_milliseconds(decision) for _ in range(_ROUNDS)]
        text = f"1,000 waiting, 500 slots, 125 nodes, all free, {what}"
        figures.append(Figure(what=text, unit="ms", values=values, bar=50))
    return figures


def _measure_lab() -> list[Figure]:
    """200 users in 20 groups, with past use and quotas, 5,000 waiting trials, 400 slots."""
    from paceline._cluster.master.scheduling.pool_policies import Sharing
    from paceline._cluster.master.scheduling.pools import (
        Holding,
        NodeSlots,
        PolicyName,
        PoolSettings,
        QuotaLimits,
        Waiting,
    )
    from paceline._cluster.master.scheduling.schedule import schedule

    users = [f"user-{n}" for n in range(200)]
    reserved = frozenset({users[0]})
    nodes = [
        NodeSlots(
            node_id=n, slots=tuple(range(8)), can_join=True,
            reserved_for=reserved if n < 3 else None,
        )
        for n in range(50)
    ]  # fmt: skip
    waiting = [
        Waiting(
            trial_id=n, experiment_id=n % 1000, num_slots=1 + n % 4, max_slots=None,
            user=users[n % 200], queue_place=float(n), priority=10 + n % 5,
            is_interactive=n % 50 == 0,
        )
        for n in range(5000)
    ]  # fmt: skip
    # Each eighth user has a running attempt more than others.
    held = [
        Holding(
            experiment_id=n % 1000, slots=(n % 8,), node_id=n // 8, attempt_id=n,
            user=users[n // 2 if n % 8 else 0], priority=30, queue_place=float(5000 + n),
            is_filler=n % 10 == 0,
        )
        for n in range(400)
    ]  # fmt: skip
    # Each fifth user has no group.
    groups = {user: f"@group-{n % 20}" for n, user in enumerate(users) if n % 5}
    owners = [*users, *sorted({*groups.values()})]
    sharing = Sharing(
        weights={owner: 1.0 + n % 3 for n, owner in enumerate(owners)},
        past={"default": {owner: float(n * 37 % 101) for n, owner in enumerate(owners)}},
        served={"default": {owner: float(n * 53 % 211) for n, owner in enumerate(owners)}},
        quotas={
            owner: QuotaLimits(whose=owner, max_slots=24 if owner[0] == "@" else 4)
            for owner in owners
        },
        groups=groups,
    )
    cases: list[tuple[PolicyName, str, list[Holding], bool]] = [
        (policy, what, holding, False)
        for policy in PolicyName
        for what, holding in (("all slots in use", held), ("all slots free", []))
    ]
    cases += [(PolicyName.FAIR_SHARE, "all slots free, interactive first", [], True)]
    figures = []
    for policy, what, holding, is_interactive in cases:
        settings = PoolSettings(policy=policy, backfill=True, is_interactive_now=is_interactive)
        pools = {"default": settings}
        text = f"5,000 waiting, 200 users, 400 slots, 50 nodes, {policy.value}, {what}"
        decision = partial(schedule, waiting, holding, nodes, pools, sharing)
        values = [_milliseconds(decision) for _ in range(_ROUNDS)]
        figures.append(Figure(what=text, unit="ms", values=values, bar=50))
        if policy is PolicyName.FAIR_SHARE and not is_interactive:
            queue = partial(_whole_queue, waiting, holding, nodes, pools, sharing)
            values = [_milliseconds(queue) for _ in range(_ROUNDS)]
            what = f"all reasons and estimated starts of them, {what}"
            figures.append(Figure(what=what, unit="ms", values=values, bar=None))
    return figures


def _whole_queue(
    waiting: Any, holding: list[Any], nodes: list[Any], pools: Any, sharing: Any
) -> None:
    """Do what the list of the queue does with all trials: results and estimates."""
    from paceline._cluster.master.scheduling.pools import StartEstimates
    from paceline._cluster.master.scheduling.schedule import decide

    ends = {one.attempt_id: 1000.0 + one.attempt_id for one in holding}
    starts = StartEstimates(holding, nodes, ends, pools)
    for result in decide(waiting, holding, nodes, pools, sharing):
        starts.note(result)


def _measure_ticks() -> list[Figure]:
    """The same as whole passes of a master over its database, in which nothing changes."""
    from paceline._cluster.master.home_directory import Home
    from paceline._cluster.master.master import Master
    from paceline._cluster.master.scheduling.pools import NodeSlots
    from paceline._cluster.messages.runner_messages import LOCAL_NODE
    from paceline.config import validate_config

    nodes = [NodeSlots(node_id=n, slots=(0,)) for n in range(1, _NUM_SLOTS + 1)]
    nodes += [
        NodeSlots(node_id=n, slots=(0,), pool="other")
        for n in range(_NUM_SLOTS + 1, _NUM_NODES + 1)
    ]
    number = (_NUM_WAITING + _NUM_SLOTS) // _NUM_EXPERIMENTS
    config = validate_config(
        {
            "entrypoint": "true",
            "searcher": {"name": "random", "metric": "loss", "max_trials": number,
                         "max_concurrent_trials": 0},
            "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1}},
        }
    )  # fmt: skip
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        home = Home(Path(directory) / "home")
        home.prepare()
        master = Master(home, ["cpu"])
        master.nodes.slots = lambda: nodes  # type: ignore[method-assign]
        # All of them are this machine.
        here = master.nodes.place(LOCAL_NODE)
        master.nodes.place = lambda _: here  # type: ignore[method-assign, assignment]
        for _ in range(_NUM_EXPERIMENTS):
            master.database.write(
                lambda t: master.commands.create(
                    t, config, submitted_config=None, context_digest=None, activate=True
                )
            ).result()

        def make_pass() -> None:
            master.database.write(master.reconciler._pass).result()

        make_pass()
        for policy in ("fifo", "priority", "fair_share"):
            _set_policy(master, policy)
            make_pass()
            values = [_milliseconds(make_pass) for _ in range(_ROUNDS)]
            what = f"a whole pass with them over the database, {policy}, nothing to be done"
            figures.append(Figure(what=what, unit="ms", values=values, bar=50))
        master.database.close()
    return figures


def _set_policy(master: Any, policy: str) -> None:
    from sqlalchemy import delete, insert

    from paceline._cluster.master.store import tables

    def job(transaction: Any) -> None:
        transaction.connection.execute(delete(tables.pools))
        transaction.connection.execute(
            insert(tables.pools).values(name="default", policy=policy, max_slots=None, labels={})
        )

    master.database.write(job).result()


def _milliseconds(call: Callable[[], object]) -> float:
    gc.collect()
    # Of the processor, as others may use it at the same time.
    began = time.process_time()
    call()
    return (time.process_time() - began) * 1000


def measure_idle_runners() -> list[Figure]:
    """What 200 runners without work cost the master: registered, polling over real HTTP."""
    with start_master(num_slots=0) as (home, call):
        file = json.loads((home / "master.json").read_text())
        process = psutil.Process(file["pid"])
        token = call("POST", "tokens", {"name": "runners", "scope": "runner"})["secret"]
        shares, rate = asyncio.run(_poll(file["url"], token, process))
    return [
        Figure(what=f"processor of the master for {_NUM_RUNNERS} idle runners", unit="%",
               values=shares, bar=5, beside=f"{rate:.1f} polls/s"),
    ]  # fmt: skip


async def _poll(url: str, token: str, process: psutil.Process) -> tuple[list[float], float]:
    """Let runners poll; return the shares of a core that the master takes, and polls a second."""
    host, port = url.removeprefix("http://").split(":")
    counter = [0]
    runners = [
        asyncio.create_task(_runner(host, int(port), token, number, counter))
        for number in range(_NUM_RUNNERS)
    ]
    # All have registered, and the first waits are over.
    await asyncio.sleep(20.0)
    shares, polls, began = [], counter[0], time.perf_counter()
    for _ in range(3):
        before, start = process.cpu_times(), time.perf_counter()
        await asyncio.sleep(_IDLE_S / 3)
        after = process.cpu_times()
        spent = after.user + after.system - before.user - before.system
        shares.append(100 * spent / (time.perf_counter() - start))
        ended = [runner for runner in runners if runner.done()]
        assert not ended, ended[0].exception()
    rate = (counter[0] - polls) / (time.perf_counter() - began)
    for runner in runners:
        runner.cancel()
    return shares, rate


async def _runner(host: str, port: int, token: str, number: int, counter: list[int]) -> None:
    """Do what `paceline runner` does while it has nothing to do."""
    import paceline
    from paceline._cluster.messages.runner_messages import PROTOCOL

    await asyncio.sleep(number * 0.02)
    reader, writer = await asyncio.open_connection(host, port)

    async def post(path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        writer.write(
            f"POST /api/v1/{path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert head.split()[1] == "200", head
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        return json.loads(await reader.readexactly(length))

    facts = {
        "name": f"node-{number}", "key": f"key-{number}", "version": paceline.__version__,
        "protocol": PROTOCOL, "python": "/usr/bin/python3", "python_version": "3.11",
        "devices": ["0"] * 8, "device_kind": "GPU", "num_cores": 8, "memory_bytes": 2**36,
    }  # fmt: skip
    session = await post("nodes", facts)
    after = 0
    for poll in range(1, 1_000_000):
        body = {
            "key": facts["key"], "session": session["session"], "number": poll, "attempts": [],
            "alive": [], "after": after, "wait_s": min(30.0, session["lease_s"] / 3),
        }  # fmt: skip
        after = (await post(f"nodes/{session['node_id']}/poll", body))["version"]
        counter[0] += 1


NAMED_CASES: dict[str, Callable[[], list[Figure]]] = {
    "scheduling": measure_scheduling,
    "scheduling-use": measure_use,
    "idle-runners": measure_idle_runners,
}
