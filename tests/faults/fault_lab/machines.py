"""Machines as network namespaces, joined by a bridge on this machine; their links can drop packets.

Needs root, `ip` and `bridge`. All machines see the same processes and files.
"""

import itertools
import os
import shutil
import subprocess

_NUMBERS = itertools.count()
_LAST = 250


def has_namespaces() -> bool:
    """Tell whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("bridge") is None:
        return False
    name = f"paceline-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


class Machine:
    """A namespace with an address of its own; `Network.add` makes one."""

    def __init__(self, namespace: str, port: str, bridge: str, address: str) -> None:
        self.namespace = namespace
        self.address = address
        self._port = port
        self._bridge = bridge
        self._is_cut = False

    def command(self, *words: str) -> list[str]:
        """Return the command that runs another one on this machine, as the same process."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def cut(self) -> None:
        """Drop all packets between it and all others; nobody is told."""
        _ip("link", "set", self._port, "nomaster")
        self._is_cut = True

    def heal(self) -> None:
        """Let packets through again."""
        _ip("link", "set", self._port, "master", self._bridge)
        self._is_cut = False

    def limit(self, bytes_per_s: int) -> bool:
        """Send at most so many bytes in a second from now on; False if this system cannot do so."""
        if shutil.which("tc") is None:
            return False
        words = [
            "tc",
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            f"{8 * bytes_per_s}bit",
        ]
        command = self.command(*words, "burst", "256kb", "latency", "50ms")
        return subprocess.run(command, check=False).returncode == 0

    def separate(self, is_separate: bool) -> None:
        """Drop packets between it and other separate machines; this one, the bridge, is reached.

        A machine that is cut off has no such state, and comes back without it.
        """
        if self._is_cut:
            return
        state = "on" if is_separate else "off"
        command = ["bridge", "link", "set", "dev", self._port, "isolated", state]
        subprocess.run(command, check=True)

    def close(self) -> None:
        """Remove it."""
        _ip("link", "del", self._port)
        _ip("netns", "del", self.namespace)


class Network:
    """Machines on one bridge; `address` is this machine's."""

    def __init__(self) -> None:
        # A link goes a moment after its namespace, so each one has names of its own.
        number = next(_NUMBERS)
        self._name = f"{os.getpid()}-{number}"
        self._bridge = f"pb{self._name}"
        self._network = f"10.{200 + number % 50}.{os.getpid() % 256}"
        self.address = f"{self._network}.{_LAST}"
        self.machines: list[Machine] = []
        _ip("link", "add", self._bridge, "address", _hardware(_LAST), "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def add(self) -> Machine:
        """Add a machine."""
        number = len(self.machines) + 1
        namespace, port = f"paceline-{self._name}-{number}", f"pp{self._name}-{number}"
        made = Machine(namespace, port, self._bridge, f"{self._network}.{number}")
        _ip("netns", "add", namespace)
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "address",
            _hardware(number), "netns", namespace)  # fmt: skip
        _ip("-n", namespace, "addr", "add", f"{made.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", device, "up")
        _ip("link", "set", port, "master", self._bridge)
        _ip("link", "set", port, "up")
        # Hardware addresses that nobody has to ask for: a machine that does not answer would be
        # told to be unreachable otherwise, and not be silent.
        _know(made.address, number, "dev", self._bridge)
        _know(self.address, _LAST, "dev", "eth0", namespace=namespace)
        for index, other in enumerate(self.machines, 1):
            _know(made.address, number, "dev", "eth0", namespace=other.namespace)
            _know(other.address, index, "dev", "eth0", namespace=namespace)
        self.machines.append(made)
        return made

    def separate(self, is_separate: bool) -> None:
        """Drop packets between all machines, which still reach this one; or let them through."""
        for machine in self.machines:
            machine.separate(is_separate)

    def close(self) -> None:
        """Remove all machines; again changes nothing."""
        while self.machines:
            self.machines.pop().close()
        if self._bridge:
            _ip("link", "del", self._bridge)
            self._bridge = ""


def _hardware(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"


def _know(address: str, number: int, *device: str, namespace: str = "") -> None:
    where = ("-n", namespace) if namespace else ()
    _ip(*where, "neigh", "replace", address, "lladdr", _hardware(number), "nud", "permanent",
        *device)  # fmt: skip


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
