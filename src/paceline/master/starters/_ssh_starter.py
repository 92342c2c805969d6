"""Start runners on a list of hosts by the system's `ssh`."""

import re
import shlex
from collections.abc import Set
from typing import Annotated

from pydantic import Field

from paceline.config import Section
from paceline.master.starters._cluster_programs import run_program
from paceline.master.starters._starter_base import RunnerOrder, Starter, StarterError


class SshOptions(Section):
    """Fields of `options`.

    Attributes:
        hosts: The hosts, as `ssh` takes them: `box`, `me@box`, or a name of its configuration.
        ssh_options: Further arguments of `ssh`, such as `[-p, "2222"]`.
    """

    hosts: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9@._:-]*$")]], Field(min_length=1)
    ]
    ssh_options: list[str] = []


class SshStarter(Starter):
    """One runner on each host.

    It belongs to no connection: it goes on without this master, and the next one finds it as it
    polls. A second one on a host ends at once, as the first one holds the directory.
    """

    Options = SshOptions
    knows_all = False
    options: SshOptions

    def new_name(self, taken: Set[str]) -> str | None:
        """Return the name of the runner of a host that has none."""
        names = self._hosts()
        return next((name for name in names if name not in taken), None)

    def start(self, order: RunnerOrder) -> None:
        """Write the token file of a host by the input of `ssh`, and start the runner there."""
        name = shlex.quote(order.name)
        place = '"$d"'
        certificate = 'cat > "$d/master.pem"' if order.certificate else 'rm -f "$d/master.pem"'
        script = (
            f"umask 077; d={_shell_path(self.directory)}/{name}; mkdir -p {place}"
            ' && IFS= read -r t && printf %s "$t" > "$d/token.new" && mv "$d/token.new" "$d/token"'
            f" && {certificate} || exit 1;"
            f" nohup {order.shell(name, place, place + '/token')}"
            ' </dev/null >>"$d/runner.log" 2>&1 &'
        )
        host = self._hosts()[order.name]
        command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"]
        command += [*self.options.ssh_options, "--", host, script]
        try:
            run_program(command, f"{order.token}\n{order.certificate or ''}")
        except StarterError as error:
            raise StarterError(f"Host {host}: {error}") from error

    def runners(self) -> dict[str, bool]:
        """Return nothing: the runners say by themselves that they run."""
        return {}

    def log_of(self, name: str) -> str:
        """Name the host as well."""
        return f"{self.directory}/{name}/runner.log on {self._hosts()[name]}"

    def _hosts(self) -> dict[str, str]:
        return {
            f"{self.pool}-{re.sub(r'[^A-Za-z0-9_.-]', '-', host)}"[:63]: host
            for host in self.options.hosts
        }


def _shell_path(path: str) -> str:
    """Return a path as a word of a shell there, with its home directory for `~`."""
    return '"$HOME"' + shlex.quote(path[1:]) if path.startswith("~") else shlex.quote(path)
