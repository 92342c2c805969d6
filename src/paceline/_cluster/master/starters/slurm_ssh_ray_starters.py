"""Base class of starters (plug point), and those by programs: Slurm, ssh, Ray."""

import json
import re
import secrets
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline._base.files import open_private
from paceline._base.request_program import RequestProgram
from paceline.config._fields_and_problems import Section


class StarterError(RuntimeError):
    """Raised when runners cannot be started, listed or canceled now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOrder:
    """Order to start a runner.

    Attributes:
        name: The name of its node.
        url: Where the master answers.
        token: Its own token, for a node of this name in this pool. It must be in no command line.
        node_key: The key of a starter that may start the runner in another directory by the same
            token puts there into the file `node_key`, so that the master knows the node again.
        certificate: The certificate of the master (PEM) if it has one, for the file `master.pem`
            in the directory of the runner.
        command: The command line of the runner, without `--name`, `--dir` and `--token-file`.
    """

    name: str
    url: str
    token: str = field(repr=False)
    node_key: str = field(default="", repr=False)
    certificate: str | None = None
    command: tuple[str, ...] = ()

    def shell(self, name: str, directory: str, token_file: str) -> str:
        """Return the command line for a shell; the arguments are shell words already."""
        places = f" --name {name} --dir {directory} --token-file {token_file}"
        return shlex.join(self.command) + places


class Starter(ABC):
    """Base of starters of runners: an object per pool, called from a single thread.

    A runner registers as a node, asks for attempts, and leaves when it was idle for long enough.
    So a starter only starts it, says which ones there are, and cancels those that still wait.
    Implementations must survive the master: `runners` also lists the runners of an earlier master.
    """

    Options: type[Section] = Section
    """The fields of `options` in the definition of a pool."""

    knows_all = True
    """Whether a runner that `runners` does not list has ended."""

    module: str | None = None
    """The needed installation beside Paceline, an extra of the same name as the starter."""

    def __init__(self, pool: str, cluster_id: str, directory: str, options: Section) -> None:
        self.pool = pool
        self.cluster_id = cluster_id
        self.directory = directory
        self.options = options

    def new_name(self, taken: Set[str]) -> str | None:
        """Return the name of another runner; None if there can be no more."""
        return f"{self.pool}-{secrets.token_hex(3)}"

    def new_names(self, taken: Set[str], most: int) -> Sequence[str]:
        """Return the names of other runners to be started together, as many as there can be."""
        names: list[str] = []
        while len(names) < most:
            name = self.new_name(taken | set(names))
            if name is None:
                break
            names.append(name)
        return names

    @abstractmethod
    def start(self, order: RunnerOrder) -> None:
        """Start a runner, or request its start.

        Raises:
            StarterError: It cannot be started.
        """

    def start_group(self, orders: Sequence[RunnerOrder]) -> None:
        """Start the runners of a trial on several nodes: all or none, if the cluster can.

        Raises:
            StarterError: They cannot be started.
        """
        for order in orders:
            self.start(order)

    @abstractmethod
    def runners(self) -> dict[str, bool]:
        """Return the names of waiting and running runners, each with whether the runner runs.

        Raises:
            StarterError: They cannot be listed now.
        """

    def log_of(self, name: str) -> str:
        """Return the place of a runner's output, for people."""
        return f"{self.directory}/{name}/runner.log on its machine"

    def why_waiting(self) -> str | None:
        """Return the reasons for waiting as of the last `runners`; None if unknown."""
        return None

    def cancel(self, name: str) -> None:
        """Cancel a waiting runner together with its group."""
        return

    def close(self) -> None:
        """End this process's own resources and pending calls; the runners continue."""
        return


_TIMEOUT_S = 60.0


def run_program(command: Sequence[str], text: str = "", *, timeout_s: float = _TIMEOUT_S) -> str:
    """Run a program with a text as its input and return its output.

    Raises:
        StarterError: It is not installed, fails, or takes too long.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError as error:
        raise StarterError(
            f"`{command[0]}` must be installed on the machine of the master, but is not."
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StarterError(f"`{command[0]}` failed: {type(error).__name__}.") from error
    if done.returncode != 0:
        said = " | ".join(done.stderr.strip().splitlines()[-3:]) or "it printed nothing"
        raise StarterError(f"`{command[0]}` failed with exit code {done.returncode}: {said}")
    return done.stdout


# States of jobs whose nodes are given to them.
_RUNNING = frozenset({"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STAGE_OUT"})
_OVER = frozenset(
    [
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "TIMEOUT",
    ]
)  # fmt: skip

_Word = Annotated[str, Field(pattern=r"^\S+$")]


# Slurm's forms: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM and D-HH:MM:SS.
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


class SlurmOptions(Section):
    """Fields of `options`.

    Attributes:
        partition: The partition, the default one if None.
        account: The account.
        time_limit: The time limit of each job, as Slurm takes it.
        gpus_per_node: GPUs of each runner.
        cpus_per_node: CPU cores of each runner.
        signal_before: How many seconds before its time limit a job gets the signal to end, so that
            its trials store checkpoints.
        sbatch_options: Further arguments of `sbatch`.
    """

    partition: _Word | None = None
    account: _Word | None = None
    time_limit: _Word | None = None
    gpus_per_node: Annotated[int, Field(ge=1)] | None = None
    cpus_per_node: Annotated[int, Field(ge=1)] | None = None
    signal_before: Annotated[int, Field(ge=1, le=65_535)] = 120
    sbatch_options: list[_Word] = []

    @model_validator(mode="after")
    def _check_times(self) -> "SlurmOptions":
        limit_s = _seconds(self.time_limit or "")
        if limit_s is not None and limit_s <= self.signal_before:
            raise ValueError(
                f"`time_limit` must be longer than `signal_before` ({self.signal_before} s), as a"
                " job is told to end so long before its limit, but got"
                f" {self.time_limit!r}, which is {limit_s} s."
            )
        return self


class SlurmStarter(Starter):
    """Slurm starter: a job for each runner or group, each runner on its own node.

    The nodes must share the directory of the pool with the machine of the master. The
    batch script of a single runner replaces itself by the runner, so that every signal of Slurm
    reaches it. Several runners are steps of their job, so Slurm knows the ones still running.
    """

    Options = SlurmOptions
    options: SlurmOptions

    def __init__(self, pool: str, cluster_id: str, directory: str, options: Section) -> None:
        super().__init__(pool, cluster_id, directory, options)
        # Runners whose steps were seen: without one, they have ended.
        self._begun: set[str] = set()
        # How many runners wait for each reason that `squeue` gives.
        self._waiting: Counter[str] = Counter()

    def new_names(self, taken: Set[str], most: int) -> Sequence[str]:
        """Return names of a common job, numbered if there are several."""
        if most < 2:
            return super().new_names(taken, most)
        group = self.new_name(taken)
        return [f"{group}.{number}" for number in range(most)]

    def start(self, order: RunnerOrder) -> None:
        """Submit a job with a single node."""
        run_program(self._sbatch([order]), f"#!/bin/sh\nexec {self._runner(order)}\n")

    def start_group(self, orders: Sequence[RunnerOrder]) -> None:
        """Submit a job with a node per runner, started by Slurm as a whole."""
        if len(orders) == 1:
            self.start(orders[0])
            return
        # Slurm itself signals the steps, and srun passes on its own signals.
        lines = ["#!/bin/sh", "trap '' TERM"]
        for number, order in enumerate(orders):
            step = [
                "srun", "--nodes=1", "--ntasks=1", f"--relative={number}",
                f"--job-name={order.name}", "--input=none", "--mpi=none", "--cpu-bind=none",
                f"--output={self._place(order.name) / 'runner.log'}",
            ]  # fmt: skip
            if self.options.cpus_per_node is not None:
                step.append(f"--cpus-per-task={self.options.cpus_per_node}")
            lines.append(f"{shlex.join(step)} {self._runner(order)} &")
        run_program(self._sbatch(orders), "\n".join([*lines, "wait", ""]))

    def runners(self) -> dict[str, bool]:
        """Return the runners in the jobs of this pool by name."""
        jobs = self._jobs()
        is_running = {name: is_running for names, is_running in jobs for name in names}
        self._begun &= is_running.keys()
        if any(len(names) > 1 and is_running for names, is_running in jobs):
            steps = run_program(["squeue", "--me", "--steps", "--noheader", "--format=%j"])
            here = is_running.keys() & set(steps.split())
            for name in self._begun - here:
                del is_running[name]
            self._begun |= here
        return is_running

    def why_waiting(self) -> str | None:
        """Return Slurm's reasons for the waiting jobs; None without waiting jobs."""
        if not self._waiting:
            return None
        reasons = [
            f"{number} {'runner waits' if number == 1 else 'runners wait'} in the queue of Slurm:"
            f" {reason}."
            for reason, number in sorted(self._waiting.items())
        ]
        return " ".join(reasons)

    def log_of(self, name: str) -> str:
        """Return the path of the job's output; a job of several runners has a common file."""
        first, _, number = name.rpartition(".")
        is_one_of_several = number.isdecimal()
        place = self._place(f"{first}.0" if is_one_of_several else name)
        return f"{place}/{'job.log' if is_one_of_several else 'runner.log'}"

    def cancel(self, name: str) -> None:
        """Cancel a waiting job."""
        for names, _ in self._jobs():
            if name in names:
                job = f"--name={self._job_name(names)}"
                run_program(["scancel", "--me", "--state=PENDING", job])

    def _jobs(self) -> list[tuple[Sequence[str], bool]]:
        """Return the runners of each job of this pool, and whether the job runs."""
        found: list[tuple[Sequence[str], bool]] = []
        waiting: Counter[str] = Counter()
        # Ended jobs stay listed for some minutes, so their state must be checked.
        listed = run_program(["squeue", "--me", "--noheader", "--format=%T %j %r"])
        for line in listed.splitlines():
            # A reason may have several words; the names of jobs have no blanks.
            state, job, reason = (*line.split(maxsplit=2), "", "", "")[:3]
            if job.startswith(self._prefix) and state not in _OVER:
                name, _, size = job.removeprefix(self._prefix).partition("*")
                names = [f"{name}.{number}" for number in range(int(size))] if size else [name]
                found.append((names, state in _RUNNING))
                if state == "PENDING" and reason not in ("", "None"):
                    waiting[reason] += len(names)
        self._waiting = waiting
        return found

    def _job_name(self, names: Sequence[str]) -> str:
        several = len(names) > 1
        name = names[0].removesuffix(".0") + f"*{len(names)}" if several else names[0]
        return self._prefix + name

    @property
    def _prefix(self) -> str:
        """Common prefix of this pool's job names."""
        return f"paceline-{self.cluster_id[:8]}-{self.pool}:"

    def _place(self, name: str) -> Path:
        return Path(self.directory).expanduser() / name

    def _runner(self, order: RunnerOrder) -> str:
        """Write the token file of a runner, and return its command line for a shell."""
        directory = self._place(order.name)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A file, as all users of a node can see command lines.
            with open_private(directory / "token", "w") as file:
                file.write(order.token)
            if order.certificate is not None:
                (directory / "master.pem").write_text(order.certificate)
        except OSError as error:
            raise StarterError(f"{str(directory)!r} must be writable, but got {error}.") from error
        place = shlex.quote(str(directory))
        return order.shell(shlex.quote(order.name), place, f"{place}/token")

    def _sbatch(self, orders: Sequence[RunnerOrder]) -> list[str]:
        options = self.options
        names = [order.name for order in orders]
        directory = self._place(names[0])
        several = len(names) > 1
        given = {
            "partition": options.partition,
            "account": options.account,
            "time": options.time_limit,
            "gpus-per-node": options.gpus_per_node,
            "cpus-per-task": options.cpus_per_node,
        }
        return [
            "sbatch",
            f"--job-name={self._job_name(names)}",
            f"--nodes={len(names)}",
            f"--ntasks={len(names)}",
            # The master asks for another job; this one's token would be over.
            "--no-requeue",
            f"--signal={'' if several else 'B:'}TERM@{options.signal_before}",
            f"--output={directory / ('job.log' if several else 'runner.log')}",
            f"--chdir={directory}",
            *(f"--{key}={value}" for key, value in given.items() if value is not None),
            *options.sbatch_options,
        ]


def _seconds(time_limit: str) -> int | None:
    """Return the seconds of a Slurm time limit, None for other formats."""
    match = _TIME.fullmatch(time_limit)
    if match is None:
        return None
    days, *found = match.groups()
    first, second, third = (int(part or 0) for part in found)
    if days is not None or found[2] is not None:
        hours, minutes, seconds = first, second, third
    else:
        hours, minutes, seconds = 0, first, second
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


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
    """SSH starter: a runner on each host.

    It belongs to no connection: it continues without this master, and the next one finds it as it
    polls. A second one on a host ends at once, as the first one holds the directory.
    """

    Options = SshOptions
    knows_all = False
    options: SshOptions

    def new_name(self, taken: Set[str]) -> str | None:
        """Return the runner name of a host without a runner; None if there is no free host."""
        names = self._hosts()
        return next((name for name in names if name not in taken), None)

    def start(self, order: RunnerOrder) -> None:
        """Write the token file of a host by the input of `ssh`, and start the runner there."""
        name = shlex.quote(order.name)
        place = '"$d"'
        certificate = 'cat > "$d/master.pem"' if order.certificate else 'rm -f "$d/master.pem"'
        # The token is moved into place: a runner that reads it again never meets a part.
        script = (
            f"umask 077; d={_shell_path(self.directory)}/{name}; mkdir -p {place}"
            ' && IFS= read -r t && printf %s "$t" > "$d/token.new" && mv "$d/token.new" "$d/token"'
            f" && {certificate} || exit 1;"
            f" nohup {order.shell(name, place, place + '/token')}"
            ' </dev/null >>"$d/runner.log" 2>&1 &'
        )
        host = self._hosts()[order.name]
        # BatchMode lets ssh fail where it would ask for a password.
        command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"]
        command += [*self.options.ssh_options, "--", host, script]
        try:
            run_program(command, f"{order.token}\n{order.certificate or ''}")
        except StarterError as error:
            raise StarterError(f"Host {host}: {error}") from error

    def runners(self) -> dict[str, bool]:
        """Return nothing: the runners announce themselves by their polls."""
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


_Amount = Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)]


class RayOptions(Section):
    """Fields of `options`.

    Attributes:
        address: The address of the cluster, such as `head:6379`, or `auto` for the one that this
            machine is a node of.
        start: Whether to start a cluster of this machine alone, which ends with the master.
        strategy: Whether the runners of one trial must be on different nodes (`STRICT_SPREAD`), or
            on as few as possible (`PACK`).
        cpus_per_node: CPUs of each runner.
        gpus_per_node: GPUs of each runner.
        resources: Further resources of Ray of each runner.
    """

    address: Annotated[str, Field(min_length=1)] | None = None
    start: bool = False
    strategy: Literal["STRICT_SPREAD", "PACK"] = "STRICT_SPREAD"
    cpus_per_node: _Amount = 1.0
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    resources: dict[str, _Amount] = {}

    @model_validator(mode="after")
    def _check_cluster(self) -> "RayOptions":
        if (self.address is None) != self.start:
            raise ValueError("`options` must have either `address` or `start: true`")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                "`address` must be that of the cluster, such as head:6379, but got that of a Ray"
                f" client ({self.address}): the machine of the master must be a node"
            )
        return self


class RayStarter(Starter):
    """Ray starter: an actor for each runner, a placement group for runners starting together.

    Another process talks to Ray. The actors are detached: they continue without it and without this
    master, unless it has started the cluster.
    """

    Options = RayOptions
    module = "ray"
    options: RayOptions

    def __init__(self, pool: str, cluster_id: str, directory: str, options: Section) -> None:
        super().__init__(pool, cluster_id, directory, options)
        self._waiting: str | None = None
        self._program = RequestProgram(
            "Ray",
            [
                sys.executable,
                "-m",
                "paceline._cluster.master.starters.ray_runners",
                self._settings(),
            ],
            StarterError,
        )

    def start(self, order: RunnerOrder) -> None:
        """Ask for an actor."""
        self.start_group([order])

    def start_group(self, orders: Sequence[RunnerOrder]) -> None:
        """Ask for a placement group with an actor in each bundle."""
        self._program.ask("start", orders=[_as_json(order) for order in orders])

    def runners(self) -> dict[str, bool]:
        """Return the runners in the placement groups of this pool."""
        answer = self._program.ask("runners")
        if answer["failed"]:
            why = [f"The runner {name} failed. {text}" for name, text in answer["failed"].items()]
            raise StarterError(" ".join(why))
        self._waiting = " ".join(answer["waiting"]) or None
        found: dict[str, bool] = answer["runners"]
        return found

    def why_waiting(self) -> str | None:
        """Return the resources missing for the waiting placement groups."""
        return self._waiting

    def cancel(self, name: str) -> None:
        """Remove the placement group of a waiting runner."""
        self._program.ask("cancel", name=name)

    def close(self) -> None:
        """End the process talking to Ray."""
        self._program.close()

    def _settings(self) -> str:
        options = self.options
        bundle = {
            "CPU": options.cpus_per_node,
            "GPU": options.gpus_per_node,
            **options.resources,
        }
        return json.dumps(
            {
                "address": options.address,
                "namespace": f"paceline-{self.cluster_id}",
                "pool": self.pool,
                "directory": self.directory,
                "strategy": options.strategy,
                "bundle": {name: amount for name, amount in bundle.items() if amount},
            }
        )


def _as_json(order: RunnerOrder) -> dict[str, Any]:
    return {
        "name": order.name,
        "token": order.token,
        "certificate": order.certificate,
        "command": [*order.command, "--name", order.name],
    }
