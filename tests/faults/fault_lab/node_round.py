"""One round over several machines: searches of trials on one and on three nodes, of two users."""

import json
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from forked_processes import free_ports

from fault_lab.checker import Verdict
from fault_lab.machines import Machine, Network
from fault_lab.masters import MasterProcess
from fault_lab.nodes import NodeProcess
from fault_lab.processes import Found
from fault_lab.round import Round
from fault_lab.scripts import Search
from paceline.client import Client, Experiment

NUM_MACHINES = 3
_NUM_SLOTS = 2
# Little more than the faults take, so that some end before a lease does and others after it.
_LEASE_S = 6
_DISK_BYTES = 32 * 2**20
# Of the user of each search: less than the search would use at once.
_MOST_SLOTS = {"group": 3, "single": 2}
_CLOCK_S = 0.05


class NodeRound(Round):
    """Machines that come to a master; each has a disk of its own for the files of its attempts."""

    deadline_s = 480.0
    # Nothing here needs a master that is started again.
    stuck_s = float("inf")

    def __init__(self, directory: Path, *searches: Search) -> None:
        super().__init__(directory, *searches)
        self.network = Network()
        self.token = directory / "token"
        options = ("--host", self.network.address, "--unencrypted", "--port", str(free_ports(1)))
        options += ("--runner-timeout", str(_LEASE_S))
        self.master = MasterProcess(self.home, 0, *options)
        self._disks: list[Path] = []
        self.nodes: list[NodeProcess] = []
        self._user_tokens: dict[str, str] = {}
        # They do not see the checkpoints of the master, only those that a search says to share.
        (self.home / "checkpoints").mkdir(parents=True)
        for number in range(NUM_MACHINES):
            self.nodes.append(self._make_node(f"node{number}", self.network.add()))

    def _make_node(self, name: str, machine: Machine) -> NodeProcess:
        disk = self.directory / name
        disk.mkdir()
        size = f"size={_DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], check=True)
        self._disks.append(disk)
        return NodeProcess(
            self.master, self.token, disk / name, "--slots", str(_NUM_SLOTS),
            hidden=[self.home / "checkpoints"], machine=machine,
            log_path=self.directory / f"{name}.log",
        )  # fmt: skip

    def start(self) -> None:
        """Start a master, and nodes where there were none."""
        super().start()
        if not self._user_tokens:
            self._make_users()
        if not self.token.exists():
            self.token.touch(mode=0o600)
            self.token.write_text(self.client().create_token("nodes", scope="runner").secret)
            for node in self.nodes:
                self.start_node(node)

    def _make_users(self) -> None:
        """Give each search a user with a project and a quota, in a pool that they share."""
        client = self.client()
        client.set_pool("default", policy="fair_share", backfill=True, half_life_hours=1.0)
        for search in self.searches:
            user = f"of-{search.name}"
            client.add_user(user, role=None)
            client.create_project(search.name)
            client.set_role(user, "editor", project=search.name)
            client.set_quota(user=user, max_slots=_MOST_SLOTS[search.name])
            token = client.create_token(user, scope="admin", user=user)
            self._user_tokens[search.name] = token.secret

    def _creator(self, search: Search) -> Client:
        url = json.loads((self.home / "master.json").read_text())["url"]
        return Client(token=self._user_tokens[search.name], master=url)

    def judge(self, undisturbed: dict[str, list[Any]]) -> Verdict:
        """Check also that users see their own, keep to quotas, and are told what they used."""
        if not self.verdict.hangs:
            self._settle()
            used = {one.user: one.slot_hours for one in self.client().usage(by=["user"])}
            for search, experiment in zip(self.searches, self.experiments(), strict=True):
                self._check_user(search, experiment, used)
        return super().judge(undisturbed)

    def _check_user(self, search: Search, experiment: Experiment, used: dict[Any, float]) -> None:
        user = f"of-{search.name}"
        seen = [one.name for one in self._creator(search).list_experiments()]
        if (experiment.data.owner, seen) != (user, [search.name]):
            self.verdict.decisions.append(f"{user} sees {seen}; owner: {experiment.data.owner}")
        changes, total_s = [], 0.0
        for trial in experiment.trials():
            for attempt in trial.reload().data.attempts:
                number = sum(len(node.slots) for node in attempt.nodes) or len(attempt.slots)
                ended_at = attempt.ended_at or attempt.created_at
                total_s += number * (ended_at - attempt.created_at)
                changes += [(attempt.created_at, number), (ended_at, -number)]
        most = held = 0
        for _, change in sorted(changes):
            held += change
            most = max(most, held)
        if most > _MOST_SLOTS[search.name]:
            self.verdict.decisions.append(f"{user} held {most} slots at once, beyond the quota")
        told_s = used.get(user, 0.0) * 3600
        if abs(told_s - total_s) > _CLOCK_S:
            self.verdict.decisions.append(f"{user} used {total_s} slot seconds, told are {told_s}")

    def start_node(self, node: NodeProcess) -> None:
        """Start the runner of a node, unless there is one."""
        if node.process is None or node.process.poll() is not None:
            node.start(PACELINE_LOG_LEVEL="INFO", **self.lab.environment)

    def processes_on(self, node: NodeProcess) -> list[Found]:
        """Return the living processes of a node."""
        here = {process.pid for process in node.processes()}
        return [found for found in self.processes() if found.pid in here]

    def fill(self, node: NodeProcess) -> None:
        """Fill the disk of a node."""
        with (node.directory.parent / "filler").open("ab", buffering=0) as file:
            size = 1 << 16
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2

    def empty(self, node: NodeProcess) -> None:
        """Give a node the room back that `fill` took."""
        (node.directory.parent / "filler").unlink(missing_ok=True)

    def log(self) -> str:
        """Return the ends of the logs of the master and of the nodes."""
        texts = [super().log()]
        for path in self.directory.glob("node*.log"):
            texts.append(f"{path.name}: {path.read_text(errors='replace')[-2000:]}")
        return "\n".join(texts)

    def end(self) -> None:
        """Kill all processes and remove the machines."""
        super().end()
        for node in self.nodes:
            with suppress(Exception):
                node.close()
        for found in self.processes():
            found.kill()
        self.network.close()

    def remove(self) -> None:
        """End all processes and remove all files."""
        self.end()
        for disk in self._disks:
            subprocess.run(["umount", "--lazy", disk], check=False)
        super().remove()

    def _stop_all(self) -> None:
        for node in self.nodes:
            assert node.process is not None
            node.process.send_signal(signal.SIGTERM)
        for node in self.nodes:
            assert node.process is not None
            with suppress(subprocess.TimeoutExpired):
                node.process.wait(60)
            if node.process.returncode != 0:
                log = node.log_path.read_text(errors="replace")[-2000:]
                self.verdict.hangs.append(
                    f"{node.name} ended with {node.process.returncode} at SIGTERM: {log}"
                )
        super()._stop_all()
