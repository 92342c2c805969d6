"""Trials on several machines, each with an address of its own, whose parts are lost or cut off.

Needs root.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_lab.machines import Network, has_namespaces
from fault_lab.nodes import NodeProcess

pytestmark = pytest.mark.skipif(
    not has_namespaces(), reason="NOT TESTED: needs root and network namespaces"
)

# All ranks take part in each report and in each checkpoint. Each machine has a process that has
# left its parent, its session and its output.
SCRIPT = """
import json, os, time
from pathlib import Path
import paceline as det

info = det.get_cluster_info()
attempt = info.allocation_id.rpartition(".")[2]
out, waits = Path(os.environ["OUT"]), os.environ["WAITS"]

def wait(place, step):
    if place == waits and step == begin + 2 and not (out / f"go-{attempt}").exists():
        (out / f"{attempt}-{os.environ['RANK']}").write_text(f"{info.agent_id} {os.getpid()}")
        while not (out / f"go-{attempt}").exists():
            time.sleep(0.02)

def fork_away():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            silent = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(silent, number)
            os.execv("/bin/sleep", ["sleep", "600"])
        os._exit(0)

begin = 0
wait("start", 2)
with det.core.init() as context:
    distributed = context.distributed
    fork_away()
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            begin = json.loads((path / f"rank-{distributed.rank}").read_text())
    for step in range(begin + 1, int(os.environ["LENGTH"]) + 1):
        values = distributed.allgather(step * 10 + distributed.rank)
        if distributed.rank == 0:
            context.train.report_validation_metrics(step, {"loss": float(sum(values))})
        with context.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
            (path / f"rank-{distributed.rank}").write_text(json.dumps(step))
            wait("checkpoint", step)
        wait("training", step)
"""
LEASE_S = 10


class Machines:
    """A master on this machine, and machines with a slot each that come to it."""

    def __init__(self, master: Any, network: Network, root: Path, code: Path) -> None:
        self.master = master
        self.client = master.client()
        self.network = network
        self.root = root
        self.code = code
        self.out = root / "shared"
        self.out.mkdir()
        self.token = root / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(self.client.create_token("nodes", scope="runner").secret)
        self.nodes: dict[str, NodeProcess] = {}

    def add(self, *names: str, **variables: str) -> None:
        for name in names:
            machine = self.network.add()
            node = NodeProcess(
                self.master, self.token, self.root / name, "--slots", "1", machine=machine
            )
            self.nodes[name] = node.start(**variables)
        wait_until(lambda: all(self.state(name) == "ready" for name in names), self.told)

    def state(self, name: str) -> str:
        return {node.name: node.state for node in self.client.nodes()}.get(name, "unknown")

    def submit(
        self, *, waits: str = "", length: int = 4, max_restarts: int = 0, num_slots: int = 3,
        launcher_options: str = "",
    ) -> Any:  # fmt: skip
        variables = {"OUT": str(self.out), "WAITS": waits, "LENGTH": str(length)}
        launcher = f"python3 -m paceline.launch.torch_distributed {launcher_options}"
        config = {
            "entrypoint": f"{launcher} train.py",
            "max_restarts": max_restarts,
            "searcher": {"name": "single", "metric": "loss"},
            "resources": {"slots_per_trial": num_slots},
            "checkpoint_storage": str(self.out / "checkpoints"),
            "environment": {"variables": variables},
        }
        return self.client.create_experiment(config, self.code)

    def attempts(self, experiment: Any) -> list[Any]:
        [trial] = experiment.trials()
        return trial.reload().data.attempts

    def await_hold(self, attempt: int, num_ranks: int = 3) -> list[tuple[str, int]]:
        """Wait until all ranks hold, and return the machine and the process of each."""
        paths = [self.out / f"{attempt}-{rank}" for rank in range(num_ranks)]
        wait_until(lambda: all(p.exists() and p.read_text() for p in paths), self.told)
        return [(name, int(pid)) for name, pid in (p.read_text().split() for p in paths)]

    def go_on(self, attempt: int) -> None:
        (self.out / f"go-{attempt}").touch()

    def check(self, experiment: Any, length: int = 4, num_ranks: int = 3) -> None:
        """See that the trial ended, and that each report is there once."""
        assert experiment.wait().value == "COMPLETED", self.told()
        [trial] = experiment.trials()
        rows = [(r.steps_completed, r.metrics["loss"]) for r in trial.iter_metrics("validation")]
        added = sum(range(num_ranks))
        assert rows == [(n, float(10 * n * num_ranks + added)) for n in range(1, length + 1)]

    def told(self) -> str:
        """Return what is known when something went wrong."""
        texts = [self.master.log(), *(n.log_path.read_text() for n in self.nodes.values())]
        for experiment in self.client.list_experiments():
            for trial in experiment.trials():
                texts += [str(one) for one in trial.reload().data.attempts]
                texts += [line.text for line in trial.iter_logs()]
        return "\n".join(texts)


def wait_until(
    condition: Callable[[], object], told: Callable[[], str], timeout_s: float = 90
) -> None:
    deadline, pause_s = time.monotonic() + timeout_s, 0.02
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.3)


@pytest.fixture
def lease_s() -> int:
    """Return how long a node may be silent."""
    return LEASE_S


@pytest.fixture
def machines(
    make_master: Callable[..., Any], network: Network, lease_s: int, tmp_path: Path,
    write_context: Callable[..., Path], free_port: int,
) -> Iterator[Machines]:  # fmt: skip
    """Return machines without any that came to the master yet."""
    options = ("--runner-timeout", str(lease_s), "--port", str(free_port))
    options += ("--host", network.address, "--unencrypted")
    master = make_master(0, "home", *options).start()
    made = Machines(master, network, tmp_path, write_context(SCRIPT))
    yield made
    for node in made.nodes.values():
        node.close()


def rank_of(victim: str) -> int:
    return 0 if victim == "chief" else 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "waits"),
    [
        ("chief", "training"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("other", "start"), ("other", "training"), ("chief", "start"),
                ("chief", "checkpoint"),
            )
        ),
    ],
)  # fmt: skip
def test_a_trial_goes_on_without_the_machine_that_is_cut_off_which_reports_nothing_later(
    victim: str, waits: str, machines: Machines
) -> None:
    machines.add("a", "b", "c")
    # The launchers wait for each other for ever, so the master alone decides.
    experiment = machines.submit(waits=waits, launcher_options="--heartbeat-timeout-s 0")
    places = machines.await_hold(1)
    name, _ = places[rank_of(victim)]
    machines.add("spare")
    node = machines.nodes[name]
    assert node.machine is not None
    node.machine.cut()
    wait_until(lambda: machines.state(name) == "lost", machines.told)
    wait_until(lambda: len(machines.attempts(experiment)) == 2, machines.told)
    # It still computes, and wants to go on with what the others do not know of.
    assert node.training()
    machines.await_hold(2)
    machines.go_on(2)
    machines.check(experiment)
    machines.go_on(1)
    first, second = machines.attempts(experiment)
    assert first.exit.reason.value == "runner_lost", first
    assert f"({name})" in first.exit.error
    assert name not in {one.name for one in second.nodes}
    assert second.resumed_steps == {"start": 0, "checkpoint": 1, "training": 2}[waits]
    [trial] = experiment.trials()
    assert trial.data.restarts == 0
    said = [line.text for line in trial.iter_logs()]

    node.machine.heal()
    wait_until(lambda: machines.state(name) == "ready", machines.told)
    wait_until(lambda: not node.training(), machines.told)
    assert len(machines.attempts(experiment)) == 2
    machines.check(experiment)
    assert [line.text for line in trial.iter_logs()] == said
    # And it gets work again.
    for other in machines.nodes.keys() - {name}:
        machines.client.drain_node(other)
    again = machines.submit(num_slots=1)
    machines.check(again, num_ranks=1)
    [attempt] = machines.attempts(again)
    assert [one.name for one in attempt.nodes] == [name]


@pytest.mark.slow
@pytest.mark.parametrize("lease_s", [60])
@pytest.mark.parametrize("waits", ["start", "training", "checkpoint"])
@pytest.mark.parametrize("victim", ["chief", "other"])
def test_a_cut_of_a_minute_with_the_settings_of_everybody_costs_no_restart(
    victim: str, waits: str, machines: Machines
) -> None:
    machines.add("a", "b", "c")
    experiment = machines.submit(waits=waits)
    name, _ = machines.await_hold(1)[rank_of(victim)]
    machine = machines.nodes[name].machine
    assert machine is not None
    machine.cut()
    time.sleep(60)
    machine.heal()
    for attempt in range(1, 5):
        machines.go_on(attempt)
    machines.check(experiment)
    [trial] = experiment.trials()
    assert trial.data.restarts == 0, machines.told()
    wait_until(lambda: not any(n.training() for n in machines.nodes.values()), machines.told)


@pytest.mark.slow
def test_a_cut_between_the_machines_alone_ends_the_attempt_and_the_trial_goes_on(
    machines: Machines,
) -> None:
    machines.add("a", "b", "c")
    options = "--heartbeat-timeout-s 2"
    experiment = machines.submit(waits="training", launcher_options=options)
    machines.await_hold(1)
    # The machines reach the master, and the master them.
    machines.network.separate(True)
    wait_until(lambda: machines.attempts(experiment)[0].exit, machines.told)
    assert "The launcher of node" in machines.attempts(experiment)[0].exit.error
    machines.network.separate(False)
    for attempt in range(1, 8):
        machines.go_on(attempt)
    machines.check(experiment)


@pytest.mark.slow
def test_a_trial_whose_machines_do_not_reach_each_other_starts_once_they_do(
    machines: Machines,
) -> None:
    machines.add("a", "b")
    machines.network.separate(True)
    experiment = machines.submit(launcher_options="--nodes-timeout-s 3", num_slots=2)
    wait_until(lambda: len(machines.attempts(experiment)) >= 2, machines.told)
    machines.network.separate(False)
    machines.check(experiment, num_ranks=2)
    *before, last = (one.exit for one in machines.attempts(experiment))
    assert {one.reason.value for one in before} == {"not_formed"}, machines.told()
    assert all("none of node 1" in one.error or "not reached" in one.error for one in before)
    assert last.reason.value == "exited"
    [trial] = experiment.trials()
    assert trial.data.restarts == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "victims",
    [
        [("training", 0), ("runner", 2)],
        pytest.param([("training", 2), ("runner", 0)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_trial_goes_on_after_kill_9_of_any_process_of_any_of_its_machines(
    victims: list[tuple[str, int]], machines: Machines
) -> None:
    machines.add("a", "b", "c")
    length = 2 * len(victims) + 3
    experiment = machines.submit(waits="training", length=length, max_restarts=1)
    helpers: list[psutil.Process] = []
    for attempt, (what, rank) in enumerate(victims, 1):
        places = machines.await_hold(attempt)
        name, pid = places[rank]
        node = machines.nodes[name]
        helpers += [p for n in machines.nodes.values() for p in n.training() if is_helper(p)]
        # The runner of the machine is another one: nothing follows from its end.
        node.process.kill()
        node.process.wait()
        node.start()
        wait_until(lambda name=name: machines.state(name) == "ready", machines.told)
        assert len(machines.attempts(experiment)) == attempt
        psutil.Process(pid if what == "training" else node.runner(attempt).pid).kill()
        wait_until(lambda n=attempt: len(machines.attempts(experiment)) > n, machines.told)
    machines.go_on(len(victims) + 1)
    machines.check(experiment, length)
    assert len(helpers) >= 3 * len(victims)
    wait_until(lambda: not any(n.training() for n in machines.nodes.values()), machines.told)
    assert not [one for one in helpers if one.is_running()]
    ends = [one.exit.reason.value for one in machines.attempts(experiment)]
    assert ends == ["exited", "runner_lost", "exited"], machines.told()
    [trial] = experiment.trials()
    assert trial.data.restarts == 1
    text = machines.attempts(experiment)[0].exit.error
    assert f"Rank {victims[0][1]} was ended by SIGKILL" in text, text


# A lease that ends while the master is away would be another fault.
@pytest.mark.long
@pytest.mark.parametrize("lease_s", [60])
@pytest.mark.parametrize(
    "waits",
    ["training", *(pytest.param(w, marks=pytest.mark.slow) for w in ("start", "checkpoint"))],
)
def test_a_trial_of_three_machines_goes_on_without_the_master_that_was_killed(
    waits: str, machines: Machines
) -> None:
    machines.add("a", "b", "c")
    experiment = machines.submit(waits=waits)
    places = machines.await_hold(1)
    machines.master.kill()
    machines.go_on(1)
    # They end without a master. All that they report is sent later.
    ranks = [psutil.Process(pid) for _, pid in places]
    wait_until(lambda: not any(rank.is_running() for rank in ranks), machines.master.log)
    machines.master.start()
    machines.check(experiment)
    [attempt] = machines.attempts(experiment)
    assert attempt.exit.reason.value == "exited"
    [trial] = experiment.trials()
    assert trial.data.restarts == 0
    assert len(trial.checkpoints()) == 4
    wait_until(lambda: not any(n.training() for n in machines.nodes.values()), machines.told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rank", "cause"),
    [
        ("runner", 2, r"Node 2 \(.\): the runner died"),
        # On a busy machine, the runner may be first to end what is stopped.
        ("launcher", 0, r"Node 0 \(.\): The (launcher of node 0 was lost|entrypoint is stopped)"),
        ("launcher", 2, r"Node 2 \(.\): The (launcher of node 2 was lost|entrypoint is stopped)"),
        ("rank", 0, r"Node 0 \(.\): Rank 0 is stopped \(SIGSTOP\)"),
        ("machine", 2, r"Node 2 \(.\): the runner gave no sign of life and could not be ended"),
    ],
)
def test_a_trial_goes_on_without_what_stands_still_and_names_it(
    what: str, rank: int, cause: str, machines: Machines
) -> None:
    machines.add("a", "b", "c")
    options = "--heartbeat-timeout-s 4"
    experiment = machines.submit(waits="training", max_restarts=1, launcher_options=options)
    name, pid = machines.await_hold(1)[rank]
    machines.add("spare")
    node = machines.nodes[name]
    runner = node.runner(1)
    [launcher] = [p for p in runner.children() if not is_helper(p) and is_launcher(p)]
    stopped = {
        "runner": [runner], "launcher": [launcher], "rank": [psutil.Process(pid)],
        "machine": [psutil.Process(node.process.pid), runner, launcher, psutil.Process(pid)],
    }[what]  # fmt: skip
    for process in stopped:
        process.suspend()
    wait_until(lambda: len(machines.attempts(experiment)) == 2, machines.told)
    machines.go_on(2)
    machines.check(experiment)
    assert re.match(cause, machines.attempts(experiment)[0].exit.error), machines.told()
    if what != "launcher":
        [trial] = experiment.trials()
        assert trial.data.restarts == (what == "rank")
    for process in stopped:
        with suppress(psutil.Error):
            process.resume()
    wait_until(lambda: not any(n.training() for n in machines.nodes.values()), machines.told)
    machines.check(experiment)


def is_launcher(process: psutil.Process) -> bool:
    return "paceline.launch.torch_distributed" in " ".join(process.cmdline())


def is_helper(process: psutil.Process) -> bool:
    try:
        return process.name() == "sleep"
    except psutil.Error:
        return False


# Only `make test-all` sees what a wrong clock does.
@pytest.mark.slow
@pytest.mark.parametrize("offset_s", ["3600", "-3600"])
def test_a_clock_that_is_wrong_by_an_hour_changes_nothing(
    offset_s: str, machines: Machines, tmp_path: Path
) -> None:
    from fault_lab.library import FaultLab, NoCompilerError

    try:
        lab = FaultLab(tmp_path / "lab")
    except NoCompilerError as error:
        pytest.skip(str(error))
    machines.add("a", "b")
    machines.add("c", **lab.environment, FAULT_LAB_CLOCK_S=offset_s)
    experiment = machines.submit(waits="training")
    # Which rank is on which machine depends on which of them was first to come.
    processes = dict(machines.await_hold(1))
    assert sorted(processes) == ["a", "b", "c"]
    environment = psutil.Process(processes["c"]).environ()
    assert environment["FAULT_LAB_CLOCK_S"] == offset_s
    time.sleep(LEASE_S / 2)
    for name, seen in [(n.name, n) for n in machines.client.nodes()]:
        assert seen.state == "ready", name
    machines.go_on(1)
    machines.check(experiment)
    [attempt] = machines.attempts(experiment)
    assert attempt.created_at <= attempt.ended_at <= time.time()
    # A trial of that machine alone.
    for name in ("a", "b"):
        machines.client.drain_node(name)
    alone = machines.submit(num_slots=1)
    machines.check(alone, num_ranks=1)
    [attempt] = machines.attempts(alone)
    assert [node.name for node in attempt.nodes] == ["c"]
    assert attempt.created_at <= attempt.ended_at <= time.time()
    [trial] = alone.trials()
    assert trial.data.started_at <= trial.data.ended_at
    lab.close()


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_machine_whose_disk_stays_full_is_named(
    rank: int, machines: Machines, fill_disk: Callable[..., None],
    make_small_disk: Callable[..., Path],
) -> None:  # fmt: skip
    """Reports of rank 0 are lost there; what other ranks write to their own disk is a log alone."""
    disk = make_small_disk(size="8m")
    root = machines.root
    for number, name in enumerate("abc"):
        machines.root = disk if number == rank else root
        machines.add(name)
    experiment = machines.submit(waits="training", max_restarts=0, length=100)
    places = machines.await_hold(1)
    name, _ = places[rank]
    assert name == "abc"[rank]
    fill_disk(disk)
    machines.go_on(1)
    if rank:
        machines.check(experiment, length=100)
        [attempt] = machines.attempts(experiment)
        assert attempt.exit.outcome == "completed", attempt
        return
    assert experiment.wait().value == "ERROR", machines.told()
    [attempt] = machines.attempts(experiment)
    # What its launcher says may be lost on that disk as well.
    causes = (f"Rank {rank} ", "it ended with code 1, and could not say why")
    assert any(f"({name}): {cause}" in attempt.exit.error for cause in causes), attempt
    assert "was full for 10 s" in attempt.exit.error, attempt
