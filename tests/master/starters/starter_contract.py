"""What a pool promises with every starter, on a real cluster of each kind."""

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

TRAIN = """
import os, time
from paceline import core
with core.init() as context:
    checkpoint = context.info.latest_checkpoint
    print("from", checkpoint, flush=True)
    is_first = context.info.container_rank == 0
    if is_first:
        context.train.report_validation_metrics(1, {"loss": 0.5})
    deadline = time.monotonic() + 200
    while os.path.exists(os.environ["HOLD"]) and time.monotonic() < deadline:
        if context.preempt.should_preempt():
            with context.checkpoint.store_path({"steps_completed": 1}) as (path, uuid):
                (path / "state").write_text("1")
            break
        time.sleep(0.1)
"""


class Cluster(ABC):
    """What starts runners, as its users see it.

    Attributes:
        definition: The fields of a pool that uses it.
        variables: What the master needs in its environment.
        waiting: Options with which runners wait for ever, None if there are none.
        starts_groups: Whether the runners of one trial are started as one.
        tells_ends: Whether the master hears from it that a runner has ended.
        num_places: How many runners it has room for.
    """

    definition: dict[str, Any]
    variables: dict[str, str] = {}
    waiting: dict[str, Any] | None = None
    starts_groups = True
    tells_ends = True
    num_places = 2

    @abstractmethod
    def jobs(self) -> list[bool]:
        """Return whether each runner of the cluster runs."""

    @abstractmethod
    def num_groups(self) -> int:
        """Return in how many groups the runners were started."""

    @abstractmethod
    def end_one(self) -> None:
        """End a runner as a user would, without the master."""


class Pool:
    """A master without slots of its own, and one pool."""

    def __init__(self, root: Path, definition: dict[str, Any], variables: dict[str, str]) -> None:
        self.home = root / "home"
        self.hold = root / "hold"
        self.hold.touch()
        (root / "code").mkdir()
        (root / "code" / "train.py").write_text(TRAIN)
        self.code = root / "code"
        definition = {"python": sys.executable, "directory": str(root / "runners")} | definition
        (root / "pools.yaml").write_text(yaml.safe_dump({"pools": {"far": definition}}))
        self._variables = variables
        self.start()

    def start(self, port: str = "0") -> None:
        """Start the master."""
        root = self.home.parent
        with (root / "log").open("a") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "paceline.cli", "up", "--home", str(self.home), "--port",
                    port, "--slots", "0", "--pool-file", str(root / "pools.yaml"),
                ],
                env=os.environ | self._variables,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )  # fmt: skip
        self.wait(lambda: (self.home / "master.json").exists())

    def client(self) -> Any:
        """Return a client of the master."""
        from paceline.client import Client

        url = json.loads((self.home / "master.json").read_text())["url"]
        return Client(url, (self.home / "token").read_text().strip())

    def create(self, client: Any, **fields: Any) -> Any:
        """Submit a trial that lasts as long as the file `hold`."""
        config = {
            "entrypoint": "python3 train.py",
            "searcher": {"name": "single", "metric": "loss"},
            "checkpoint_storage": str(self.home.parent / "checkpoints"),
            "environment": {"variables": {"HOLD": str(self.hold)}},
        } | fields
        config["resources"] = {"pool": "far"} | config.get("resources", {})
        return client.create_experiment(config, self.code)

    def wait(self, condition: Callable[[], Any]) -> None:
        """Wait until a condition is true."""
        deadline = time.monotonic() + 180
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def log(self) -> str:
        """Return what the master has printed, and its log."""
        log = self.home / "master.log"
        printed = (self.home.parent / "log").read_text()
        return printed + (log.read_text() if log.exists() else "")

    def runner_processes(self) -> list[psutil.Process]:
        """Return the processes of runners and their attempts."""
        place = f"{self.home.parent}/runners/"
        own = {self.process.pid, os.getpid()}
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.pid not in own and place in " ".join(process.info["cmdline"] or [])
        ]

    def close(self) -> None:
        """End the master, and what it has started."""
        self.hold.unlink(missing_ok=True)
        self.process.terminate()
        self.process.wait(60)
        for process in self.runner_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def tokens_in_sight(pool: Pool) -> list[str]:
    """Return the command lines of all processes that show a token of a runner."""
    secrets = [path.read_text().split()[0] for path in pool.home.parent.rglob("runners/*/token")]
    assert secrets
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(secret in line for secret in secrets)]


def attempts_of(client: Any, experiment: Any) -> list[Any]:
    """Return the attempts of the one trial of an experiment."""
    [trial] = experiment.trials()
    return list(client._session.get(f"trials/{trial.id}", dict)["attempts"])


class StarterContract:
    """Tests for a starter. A module has a subclass, and a fixture `cluster` of a `Cluster`."""

    @pytest.mark.long
    def test_a_trial_goes_on_in_another_runner_which_leaves_when_idle(
        self, cluster: Cluster, make_pool: Callable[..., Pool]
    ) -> None:
        pool = make_pool(
            {**cluster.definition, "slots": 1, "max_runners": 1, "idle_timeout": 5.0},
            cluster.variables,
        )
        with pool.client() as client:
            experiment = pool.create(client)
            pool.wait(lambda: any(n.attempts for n in client.nodes()))
            assert tokens_in_sight(pool) == []
            assert cluster.jobs() == [True]
            [node] = client.nodes()
            assert node.labels["starter"] == cluster.definition["starter"]
            [token] = client.list_tokens()
            assert (token.node, token.pool) == (node.name, "far")
            directory = pool.home.parent / "runners" / node.name
            for path in (directory, directory / "token"):
                assert path.stat().st_mode & 0o077 == 0
            pool.wait(lambda: experiment.trials()[0].best_metric == 0.5)
            cluster.end_one()
            pool.wait(lambda: len(attempts_of(client, experiment)) == 2)
            first, second = attempts_of(client, experiment)
            assert first["exit"]["outcome"] == "preempted"
            assert second["resumed_from"] is not None
            pool.hold.unlink()
            assert experiment.wait() == "COMPLETED"
            # The second runner was idle and has left.
            pool.wait(lambda: not cluster.jobs())
            pool.wait(lambda: not pool.runner_processes())
            if cluster.tells_ends:
                pool.wait(lambda: all(t.revoked_at for t in client.list_tokens()))

    @pytest.mark.slow
    def test_a_search_over_two_runners_ends_as_if_none_had_been_ended(
        self, cluster: Cluster, make_pool: Callable[..., Pool]
    ) -> None:
        if cluster.num_places < 2:
            pytest.skip("NOT TESTED: there is one host")
        pool = make_pool(
            {**cluster.definition, "slots": 1, "max_runners": 2, "idle_timeout": 5.0},
            cluster.variables,
        )
        searcher = {"name": "random", "metric": "loss", "max_trials": 4}
        with pool.client() as client:
            experiment = pool.create(
                client,
                searcher=searcher | {"max_concurrent_trials": 2},
                hyperparameters={"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}},
            )

            def train() -> list[Any]:
                return [one for one in experiment.trials() if one.best_metric == 0.5]

            pool.wait(lambda: len(train()) == 2)
            assert cluster.jobs() == [True, True]
            cluster.end_one()
            pool.wait(lambda: any(len(one.reload().data.attempts) == 2 for one in train()))
            pool.hold.unlink()
            assert experiment.wait() == "COMPLETED"
            assert len(train()) == 4
            assert {one.state.value for one in experiment.trials()} == {"COMPLETED"}
            ended = [one.reload().data for one in experiment.trials()]
            assert [one.restarts for one in ended] == [0, 0, 0, 0], ended
            pool.wait(lambda: not cluster.jobs())

    @pytest.mark.slow
    def test_a_runner_that_waits_is_canceled_with_its_trial(
        self, cluster: Cluster, make_pool: Callable[..., Pool]
    ) -> None:
        if cluster.waiting is None:
            pytest.skip("its runners do not wait")
        options = cluster.definition["options"] | cluster.waiting
        pool = make_pool({**cluster.definition, "options": options, "slots": 1}, cluster.variables)
        with pool.client() as client:
            experiment = pool.create(client)
            pool.wait(lambda: cluster.jobs() == [False])
            experiment.kill()
            pool.wait(lambda: not cluster.jobs())
            pool.wait(lambda: all(t.revoked_at for t in client.list_tokens()))
            assert pool.runner_processes() == []

    @pytest.mark.slow
    def test_a_trial_of_two_slots_gets_two_runners_at_once(
        self, cluster: Cluster, make_pool: Callable[..., Pool]
    ) -> None:
        if cluster.waiting is None:
            pytest.skip("it starts no groups")
        pool = make_pool(
            {**cluster.definition, "slots": 1, "max_runners": 2, "idle_timeout": 5.0},
            cluster.variables,
        )
        with pool.client() as client:
            experiment = pool.create(client, resources={"slots_per_trial": 2})
            pool.wait(lambda: sum(bool(n.attempts) for n in client.nodes()) == 2)
            assert cluster.jobs() == [True, True]
            assert cluster.num_groups() == (1 if cluster.starts_groups else 2)
            pool.hold.unlink()
            assert experiment.wait() == "COMPLETED"
            pool.wait(lambda: not cluster.jobs())
            pool.wait(lambda: not pool.runner_processes())

    @pytest.mark.slow
    def test_the_next_master_goes_on_with_the_runners_of_the_last(
        self, cluster: Cluster, make_pool: Callable[..., Pool]
    ) -> None:
        pool = make_pool(
            {**cluster.definition, "slots": 1, "max_runners": 2, "idle_timeout": 5.0},
            cluster.variables,
        )
        with pool.client() as client:
            experiment = pool.create(client)
            pool.wait(lambda: any(n.attempts for n in client.nodes()))
        port = json.loads((pool.home / "master.json").read_text())["url"].rpartition(":")[2]
        pool.process.kill()
        pool.process.wait()
        (pool.home / "master.json").unlink()
        pool.start(port)
        with pool.client() as client:
            experiment = client.get_experiment(experiment.id)
            pool.hold.unlink()
            assert experiment.wait() == "COMPLETED"
            assert len(attempts_of(client, experiment)) == 1
            assert len(client.list_tokens()) == 1
            pool.wait(lambda: not cluster.jobs())
