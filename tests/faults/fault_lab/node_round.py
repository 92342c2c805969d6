"""One round over several machines: searches of trials on one and on three nodes."""

import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from forked_processes import free_ports

from fault_lab.machines import Machine, Network
from fault_lab.masters import MasterProcess
from fault_lab.nodes import NodeProcess
from fault_lab.processes import Found
from fault_lab.round import Round
from fault_lab.scripts import Search

NUM_MACHINES = 3
_NUM_SLOTS = 2
# Little more than the faults take, so that some end before a lease does and others after it.
_LEASE_S = 6
_DISK_BYTES = 32 * 2**20


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
        if not self.token.exists():
            self.token.touch(mode=0o600)
            self.token.write_text(self.client().create_token("nodes", scope="runner").secret)
            for node in self.nodes:
                self.start_node(node)

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
