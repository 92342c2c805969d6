"""Runners that a master starts on a real Slurm with two nodes, and by a real sshd."""

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    context.train.report_validation_metrics(1, {"loss": 0.5})
    deadline = time.monotonic() + 120
    while os.path.exists(os.environ["HOLD"]) and time.monotonic() < deadline:
        if context.preempt.should_preempt():
            with context.checkpoint.store_path({"steps_completed": 1}) as (path, uuid):
                (path / "state").write_text("1")
            break
        time.sleep(0.1)
"""


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
        with (root / "log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "paceline.cli", "up", "--home", str(self.home), "--port",
                    "0", "--slots", "0", "--pool-file", str(root / "pools.yaml"),
                ],
                env=os.environ | variables,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )  # fmt: skip
        self.wait(lambda: (self.home / "master.json").exists())

    def client(self) -> Any:
        from paceline.client import Client

        url = json.loads((self.home / "master.json").read_text())["url"]
        return Client(url, (self.home / "token").read_text().strip())

    def create(self, client: Any) -> Any:
        config = {
            "entrypoint": "python3 train.py",
            "searcher": {"name": "single", "metric": "loss"},
            "resources": {"pool": "far"},
            "checkpoint_storage": str(self.home.parent / "checkpoints"),
            "environment": {"variables": {"HOLD": str(self.hold)}},
        }
        return client.create_experiment(config, self.code)

    def wait(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def log(self) -> str:
        return (self.home.parent / "log").read_text()

    def close(self) -> None:
        self.hold.unlink(missing_ok=True)
        self.process.terminate()
        self.process.wait(60)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "runner" in words and str(self.home.parent) in " ".join(words):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(definition: dict[str, Any], variables: dict[str, str]) -> Pool:
        made.append(Pool(tmp_path, definition, variables))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def tokens_in_sight(pool: Pool) -> list[str]:
    """Return the command lines of all processes that show a token of a runner."""
    secrets = [path.read_text().split()[0] for path in pool.home.parent.rglob("runners/*/token")]
    assert secrets
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(secret in line for secret in secrets)]


def attempts_of(client: Any, experiment: Any) -> list[Any]:
    [trial] = experiment.trials()
    return list(client._session.get(f"trials/{trial.id}", dict)["attempts"])


def test_slurm_runs_trials_and_a_canceled_job_lets_them_go_on_in_another(
    slurm: dict[str, str], make_pool: Callable[..., Pool]
) -> None:
    pool = make_pool(
        {
            "starter": "slurm", "slots": 1, "max_runners": 1, "idle_timeout": 2.0,
            "options": {"partition": "all", "time_limit": "10", "signal_before": 60},
        },
        slurm,
    )  # fmt: skip

    def call(*command: str) -> str:
        environment = os.environ | slurm
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    # After a second, Slurm would kill a runner that has not told its attempts to leave yet.
    config = Path(slurm["SLURM_CONF"])
    config.write_text(config.read_text().replace("KillWait=1\n", "KillWait=60\n"))
    call("scontrol", "reconfigure")
    with pool.client() as client:
        experiment = pool.create(client)
        pool.wait(lambda: any(n.attempts for n in client.nodes()))
        assert tokens_in_sight(pool) == []
        [job] = call("squeue", "--noheader", "--format=%i %T").splitlines()
        assert job.endswith("RUNNING")
        [trial] = experiment.trials()
        pool.wait(lambda: experiment.trials()[0].best_metric == 0.5)
        # As its user or its administrator would: nobody asks the master.
        call("scancel", job.split()[0])
        pool.wait(lambda: len(attempts_of(client, experiment)) == 2)
        first, second = attempts_of(client, experiment)
        assert first["exit"]["outcome"] == "preempted"
        assert second["resumed_from"] is not None
        pool.hold.unlink()
        assert experiment.wait() == "COMPLETED"
        # The second runner was idle and has left.
        pool.wait(lambda: not call("squeue", "--noheader"))
        pool.wait(lambda: all(t.revoked_at for t in client.list_tokens()))


def test_a_job_that_waits_is_canceled_with_its_trial(
    slurm: dict[str, str], make_pool: Callable[..., Pool]
) -> None:
    pool = make_pool(
        {"starter": "slurm", "options": {"sbatch_options": ["--hold"]}, "slots": 1}, slurm
    )

    def jobs() -> str:
        command = ["squeue", "--noheader", "--format=%T"]
        environment = os.environ | slurm
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    with pool.client() as client:
        experiment = pool.create(client)
        pool.wait(lambda: jobs() == "PENDING")
        experiment.kill()
        pool.wait(lambda: not jobs())


def await_listener(port: int) -> None:
    """Wait until something listens on a port."""
    deadline = time.monotonic() + 60
    while True:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def sshd(tmp_path: Path, free_port: int) -> Iterator[dict[str, Any]]:
    """Start a real sshd on loopback, and return the options of the pool."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd and ssh (openssh-server, openssh-client)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    place = tmp_path / "ssh"
    place.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)], check=True
        )
    (place / "keys").write_text((place / "user.pub").read_text())
    port = free_port
    (place / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {place}/host\nPidFile none\n"
        f"AuthorizedKeysFile {place}/keys\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin yes\n"
    )
    process = subprocess.Popen(
        [program, "-D", "-e", "-f", str(place / "config")], stderr=subprocess.DEVNULL
    )
    await_listener(port)
    key = (place / "host.pub").read_text().split()
    (place / "known").write_text(f"[127.0.0.1]:{port} {key[0]} {key[1]}\n")
    options = [
        "-F", "none", "-p", str(port), "-i", str(place / "user"),
        "-o", f"UserKnownHostsFile={place}/known",
    ]  # fmt: skip
    yield {"hosts": [f"{getpass.getuser()}@127.0.0.1"], "ssh_options": options}
    process.terminate()
    process.wait(60)


def test_ssh_starts_a_runner_that_leaves_when_idle_and_is_started_again(
    sshd: dict[str, Any], make_pool: Callable[..., Pool]
) -> None:
    # It is not idle for so long while it waits for its first trial.
    pool = make_pool({"starter": "ssh", "slots": 1, "idle_timeout": 5.0, "options": sshd}, {})
    with pool.client() as client:
        for expected in (1, 2):
            pool.hold.touch()
            experiment = pool.create(client)
            pool.wait(lambda: any(n.attempts for n in client.nodes()))
            assert tokens_in_sight(pool) == []
            [node] = client.nodes()
            assert node.name == f"far-{getpass.getuser()}-127.0.0.1"
            assert node.labels["starter"] == "ssh"
            pool.hold.unlink()
            assert experiment.wait() == "COMPLETED"
            pool.wait(lambda: not client.nodes() or client.nodes()[0].state != "ready")
            assert len(client.list_tokens()) == expected
        directory = next(pool.home.parent.glob("runners/*"))
        assert directory.stat().st_mode & 0o077 == 0
        assert (directory / "token").stat().st_mode & 0o077 == 0


def test_a_host_that_refuses_is_told_in_the_log(
    sshd: dict[str, Any], make_pool: Callable[..., Pool]
) -> None:
    sshd["ssh_options"] += ["-o", "PreferredAuthentications=none"]
    pool = make_pool({"starter": "ssh", "options": sshd}, {})
    with pool.client() as client:
        pool.create(client)
        pool.wait(lambda: "Pool far: `ssh` failed" in pool.log())
