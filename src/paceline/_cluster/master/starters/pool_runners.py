"""The file `pools.yaml`, the registry of starters, and the missing runners of pools."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from paceline._base.files import make_secret
from paceline._base.imports import class_named
from paceline._cluster.master.authentication import Tokens
from paceline._cluster.master.nodes.node_registry import Nodes
from paceline._cluster.master.scheduling.pools import NodeSlots, PoolNeed
from paceline._cluster.master.starters.kubernetes_starter import KubernetesStarter
from paceline._cluster.master.starters.slurm_ssh_ray_starters import (
    RayStarter,
    RunnerOrder,
    SlurmStarter,
    SshStarter,
    Starter,
    StarterError,
)
from paceline._cluster.messages.master_models import TokenScope
from paceline._cluster.messages.runner_messages import NAME_PATTERN, STARTER_LABEL, MasterAddress
from paceline.config._fields_and_problems import Section
from paceline.config._read_yaml import read_yaml_file

logger = logging.getLogger(__name__)

ENTRY_POINTS = "paceline.starters"

_OWN: dict[str, type[Starter]] = {
    "kubernetes": KubernetesStarter,
    "ray": RayStarter,
    "slurm": SlurmStarter,
    "ssh": SshStarter,
}


def starter_named(name: str) -> type[Starter]:
    """Return the class of a starter.

    Raises:
        TypeError: The package that offers it names something else than a `Starter`.
        ValueError: Nobody offers one of this name.
    """
    kind: type[Starter] = class_named(name, ENTRY_POINTS, _OWN, Starter, "starter")
    return kind


POOL_FILE = "pools.yaml"


class PoolDefinition(Section):
    """Definition of a pool: the way to start its runners.

    Attributes:
        starter: The name of the starter, see `starter_named`.
        url: The address of the master for them; by default the one that it listens on.
        max_runners: How many there may be.
        slots: The slots of each, None for one per GPU or else CPU core. Then one is expected.
        idle_timeout: After how many seconds without an attempt a runner leaves.
        check_every: Seconds between two checks of their machines; 0 is no check at all.
        python: The interpreter on their machines, which has Paceline.
        directory: Where they keep their files; `~` is the home directory there.
        options: Fields of the starter.
    """

    starter: str
    url: str | None = None
    max_runners: Annotated[int, Field(ge=1, le=10_000)] = 1
    slots: Annotated[int, Field(ge=1, le=10_000)] | None = None
    idle_timeout: Annotated[float, Field(gt=0, le=10**7, allow_inf_nan=False)] = 300.0
    check_every: Annotated[float, Field(ge=0, le=10**7, allow_inf_nan=False)] = 1800.0
    python: str = "python3"
    directory: str = "~/.paceline-runner"
    options: dict[str, Any] = {}


class _PoolFile(Section):
    pools: dict[Annotated[str, Field(pattern=NAME_PATTERN)], PoolDefinition] = {}


def read_pool_file(path: Path, cluster_id: str) -> dict[str, tuple[PoolDefinition, Starter]]:
    """Return the pools of a file with their starters, by name.

    Raises:
        ValueError: The file is not valid; the text has one line for each problem.
    """
    pools = {}
    for name, pool in read_pool_definitions(path).items():
        try:
            kind = starter_named(pool.starter)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: pools.{name}: {error}") from error
        if kind.module is not None and find_spec(kind.module) is None:
            raise ValueError(
                f"{path}: pools.{name}: The starter {pool.starter} needs the package"
                f" `{kind.module}`, which is not installed. Hint: pip install"
                f" 'paceline[{pool.starter}]'"
            )
        options = _checked_pools(kind.Options, pool.options, path, f"pools.{name}.options.")
        pools[name] = (pool, kind(name, cluster_id, pool.directory, options))
    return pools


def read_pool_definitions(path: Path) -> dict[str, PoolDefinition]:
    """Return the pools of a file by name; their starters are not looked at.

    Raises:
        ValueError: The file is not valid; the text has one line for each problem.
    """
    found: _PoolFile = _checked_pools(_PoolFile, read_yaml_file(path), path, "")
    return found.pools


def _checked_pools(kind: type[Any], data: dict[str, Any], path: Path, prefix: str) -> Any:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [
            f"{path}: {prefix}{'.'.join(map(str, one['loc']))}: {one['msg']}, but got"
            f" {one['input']!r}."
            for one in error.errors()
        ]
        raise ValueError("\n".join(lines)) from None


def runner_groups(need: PoolNeed, num_slots: int) -> list[int]:
    """Return how many runners with so many slots the trials of a need fit on, in groups.

    A trial that is larger than one runner gets a group to itself.
    """
    groups, free = [], 0
    for size in need.sizes:
        if size > num_slots:
            groups.append(-(-size // num_slots))
        elif size <= free:
            free -= size
        else:
            groups.append(1)
            free = num_slots - size
    return groups


def missing_runners(
    groups: Sequence[int], num_idle: int, starting: Mapping[str, int]
) -> tuple[list[int], set[str]]:
    """Return the number of runners to start together for each group lacking runners.

    A group gets idle runners first. Its other runners must start together, as runners that wait one
    by one might never be there at once.

    Args:
        groups: How many runners each group needs.
        num_idle: How many runners are idle.
        starting: How many runners start together, by the name of their group.

    Returns:
        The numbers, and the groups of those that start and are needed.
    """
    missing, awaited, free = [], set(), dict(starting)
    for size in groups:
        num_taken = min(size, num_idle)
        num_idle -= num_taken
        size -= num_taken
        if not size:
            continue
        fitting = [name for name, num_free in free.items() if num_free >= size]
        if fitting:
            # The smallest group that fits leaves larger ones to larger trials.
            group = min(fitting, key=free.__getitem__)
            free[group] -= size
            awaited.add(group)
        else:
            missing.append(size)
    return missing, awaited


_TICK_S = 2.0
# How long a runner that was started may take to register; how long a pool rests after a failure.
_START_S = 60.0
_REST_S = 30.0
# The slots of a runner that counts them itself, and the runners that one trial may span.
_ASSUMED_SLOTS = 16
_MOST_JOINED = 256
_UNKNOWN_GROUP = ""
_TOKEN_PREFIX = "runner "  # noqa: S105 - the beginning of a name, no secret
_TOKEN_LIFE_S = 90 * 24 * 3600.0


class PoolRunners:
    """Thread starting runners for waiting trials, and cancelling runners no longer needed.

    The state comes anew from the starters and the nodes in each pass, so another master
    takes over the runners of this one.

    Args:
        pools: The definitions of the pools and their starters, by name.
        nodes: The nodes that have registered.
        tokens: Where the runners' tokens are made.
        needs_of: Returns the needs of the waiting trials of each pool.
        address: Where the master answers, unless a pool names another address.
    """

    def __init__(
        self,
        pools: Mapping[str, tuple[PoolDefinition, Starter]],
        nodes: Nodes,
        tokens: Tokens,
        needs_of: Callable[[], dict[str, PoolNeed]],
        address: MasterAddress,
    ) -> None:
        self._pools = pools
        self._nodes = nodes
        self._tokens = tokens
        self._needs_of = needs_of
        self._address = address
        nodes.pool_slots = [
            NodeSlots(
                node_id=-number,
                slots=tuple(range(pool.slots or _ASSUMED_SLOTS)),
                pool=name,
                can_join=True,
            )
            for name, (pool, _) in pools.items()
            for number in range(1, min(pool.max_runners, _MOST_JOINED) + 1)
        ]
        # Runners that were started and have not registered, with the time until when they may.
        self._starting: dict[str, dict[str, float]] = {name: {} for name in pools}
        # Runners that have registered: a runner that is still listed, but no node any more, leaves.
        self._registered: dict[str, set[str]] = {name: set() for name in pools}
        # Pools whose runners were looked at once: an earlier master may have met some.
        self._looked_at: set[str] = set()
        # The first runner of those that were asked for with a runner. Of those that an earlier
        # master has asked for, nobody knows: they count as one group.
        self._group_of: dict[str, dict[str, str]] = {name: {} for name in pools}
        self._rest_until = dict.fromkeys(pools, 0.0)
        # Why a pass failed last, and which runners have not registered, with the state that their
        # starter reports.
        self._no_starts: dict[str, str] = {}
        self._absent: dict[str, tuple[set[str], str]] = {}
        self._waits: dict[str, str | None] = dict.fromkeys(pools)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-runners", daemon=True)

    def start(self) -> None:
        """Begin, if there are pools."""
        if self._pools:
            self._thread.start()

    def close(self) -> None:
        """Stop; runners continue."""
        self._closing.set()
        for _, starter in self._pools.values():
            starter.close()
        if self._thread.is_alive():
            self._thread.join()

    def names(self) -> list[str]:
        """Return the names of the pools."""
        return list(self._pools)

    def failure(self, pool: str) -> str | None:
        """Return the reason for missing runners of a pool, as a sentence; None without failure.

        The reason is a sentence; None without a failure, after a later successful start, or once a
        runner has registered.
        """
        return self._no_starts.get(pool) or self._absent.get(pool, (set(), None))[1]

    def describe_starting(self, pool: str) -> str | None:
        """Return the runners of a pool still to join, with the reason if known; None if none.

        None if none is waited for.
        """
        names = sorted(self._starting.get(pool, ()))
        if not names:
            return None
        each, have = ("runner", "has") if len(names) == 1 else ("runners", "have")
        text = f"{len(names)} {each} ({', '.join(names)}) {have} not joined yet."
        return " ".join(filter(None, (text, self._waits[pool])))

    def describe_absent(self, pool: str, num_nodes: int) -> str | None:
        """Return the prospects of a pool's absent runners, as a sentence.

        None if none is waited for and there are some, or if the master starts none for the pool.

        Args:
            pool: Its name.
            num_nodes: How many nodes it has.
        """
        if pool not in self._pools:
            return None
        settings, _ = self._pools[pool]
        starting = self.describe_starting(pool)
        if starting is not None or num_nodes:
            return starting
        return (
            f"The master starts up to {settings.max_runners} runner(s) for it by"
            f" `{settings.starter}` when trials of the pool wait."
        )

    def _run(self) -> None:
        while not self._closing.wait(_TICK_S):
            try:
                needs = self._needs_of()
            except Exception:
                logger.exception("The needs of pools cannot be read.")
                continue
            for name in self._pools:
                self._look_after(name, needs.get(name))

    def _look_after(self, name: str, need: PoolNeed | None) -> None:
        if time.monotonic() < self._rest_until[name]:
            return
        try:
            self._make_pass(name, need)
            self._no_starts.pop(name, None)
        except StarterError as error:
            # A starter that is being closed fails in any case.
            if self._closing.is_set():
                return
            self._rest_until[name] = time.monotonic() + _REST_S
            self._note_no_start(name, str(error))
            logger.warning("Pool %s: %s", name, error)
        except Exception as error:
            self._rest_until[name] = time.monotonic() + _REST_S
            self._note_no_start(name, f"{type(error).__name__}: {error}")
            logger.exception("Pool %s: its runners cannot be looked after.", name)

    def _make_pass(self, name: str, need: PoolNeed | None) -> None:
        _, starter = self._pools[name]
        known = starter.runners()
        self._note_wait(name, starter.why_waiting())
        nodes = self._present(name)
        now = time.monotonic()
        met = self._note_met(name, known, nodes.keys(), now)
        if starter.knows_all:
            self._follow_known(name, known, met, now)
        else:
            self._revoke_left(name)
        self._start_missing(name, need, known, nodes, now)

    def _note_met(
        self, name: str, known: Mapping[str, bool], present: Set[str], now: float
    ) -> set[str]:
        """Return the registered runners, and record the runners late to register."""
        starting = self._starting[name]
        came = self._met(name, starting)
        met = came | present
        late = [one for one, until in starting.items() if until < now and one not in met]
        for runner in [*late, *(one for one in met if one in starting)]:
            del starting[runner]
        # Runners waiting in their cluster's queue are not late: they come after their wait.
        self._note_absent(name, came, met, [one for one in late if known.get(one, True)])
        return met

    def _follow_known(
        self, name: str, known: Mapping[str, bool], met: set[str], now: float
    ) -> None:
        """Update the state for a starter aware of all runners: wait only for its runners."""
        starting, registered = self._starting[name], self._registered[name]
        # Leaving runners keep their tokens: they still have reports to send.
        self._revoke(name, known.keys() | starting.keys() | self._heard(name))
        self._note_ended(name, known.keys() | starting.keys())
        # Runners waiting again after they ran, such as preempted jobs, must register anew.
        registered.intersection_update(one for one, is_running in known.items() if is_running)
        registered.update(met)
        if name not in self._looked_at:
            self._looked_at.add(name)
            registered.update(self._registered_before(name, known))
        # Runners unknown to this master: an earlier master asked for them, and they have ended.
        for runner in starting.keys() - known.keys() - self._group_of[name].keys():
            del starting[runner]
        starting.update(dict.fromkeys(known.keys() - registered, now + _START_S))

    def _start_missing(
        self,
        name: str,
        need: PoolNeed | None,
        known: Mapping[str, bool],
        nodes: Mapping[str, bool],
        now: float,
    ) -> None:
        """Start the runners missing for waiting trials; cancel runners no trial waits for."""
        pool, starter = self._pools[name]
        starting, group_of = self._starting[name], self._group_of[name]
        groups = [] if need is None else runner_groups(need, pool.slots or 1)
        all_ = nodes.keys() | known.keys() | starting.keys()
        for runner in group_of.keys() - all_:
            del group_of[runner]
        missing, awaited = missing_runners(
            # Without `slots`, fewer runners may have enough.
            [min(size, pool.max_runners) for size in groups],
            # Nodes that are idle wait for others, to which a trial goes with them.
            sum(nodes.values()),
            Counter(group_of.get(one, _UNKNOWN_GROUP) for one in starting),
        )
        spare = [
            runner
            for runner, is_running in known.items()
            if not is_running and group_of.get(runner, _UNKNOWN_GROUP) not in awaited
        ]
        for size in missing:
            has_room = len(all_) + size <= pool.max_runners
            names = starter.new_names(all_, size) if has_room else ()
            if len(names) < size:
                # Groups start together or not at all, so spare waiting runners must make room.
                self._cancel(name, spare)
                return
            starter.start_group([self._order(name, pool, one) for one in names])
            logger.info("Pool %s: runners were asked for: %s.", name, ", ".join(names))
            starting.update(dict.fromkeys(names, now + _START_S))
            group_of.update(dict.fromkeys(names, names[0]))
            all_ = all_ | set(names)
        if not groups:
            self._cancel(name, spare)

    def _note_no_start(self, pool: str, error: str) -> None:
        self._no_starts[pool] = f"No runner could be started for it: {error}"

    def _note_absent(self, pool: str, came: set[str], met: Set[str], late: Sequence[str]) -> None:
        """Record the runners late to register, until they or others have registered."""
        names_before, _ = self._absent.get(pool, (set(), ""))
        if came or met & names_before:
            self._absent.pop(pool, None)
        if late:
            settings, starter = self._pools[pool]
            names = sorted(late)
            each, was = ("runner", "was") if len(names) == 1 else ("runners", "were")
            has, it = ("has", "it") if len(names) == 1 else ("have", "they")
            why = (
                f"The {each} {', '.join(names)} {was} started, but {has} not registered within"
                f" {_START_S:g} s. Hint: {it} must reach the master at"
                f" {settings.url or self._address.url} (`url` of the pool). Look at"
                f" {starter.log_of(names[0])}."
            )
            self._absent[pool] = set(names), why
            logger.warning("Pool %s: %s", pool, why)

    def _note_wait(self, pool: str, why: str | None) -> None:
        if why not in (None, self._waits[pool]):
            logger.info("Pool %s: %s", pool, why)
        self._waits[pool] = why

    def _cancel(self, pool: str, runners: Sequence[str]) -> None:
        _, starter = self._pools[pool]
        for runner in runners:
            logger.info("Pool %s: runner %s is not needed any more.", pool, runner)
            starter.cancel(runner)
            self._starting[pool].pop(runner, None)

    def _present(self, pool: str) -> dict[str, bool]:
        """Return the pool's nodes in service or drained, each with whether the node is idle."""
        is_open = {node.node_id: node.is_open for node in self._nodes.slots()}
        return {
            node.name: not (node.is_draining or self._nodes.presence.reported_alive(node.id))
            for node in self._nodes.all()
            if node.facts.pool == pool and (is_open.get(node.id) or node.is_draining)
        }

    def _heard(self, pool: str) -> set[str]:
        """Return the names of a pool's present nodes."""
        return {
            node.name
            for node in self._nodes.all()
            if node.facts.pool == pool and not self._nodes.presence.is_lost(node.id)
        }

    def _met(self, pool: str, starting: Mapping[str, float]) -> set[str]:
        """Return the starting runners registered since their request, even if gone again."""
        # Nodes register by the time of day, which may be set; how long ago is known by both clocks.
        now, ticks = time.time(), time.monotonic()
        registered_ago = {
            node.name: now - node.registered_at
            for node in self._nodes.all()
            if node.facts.pool == pool
        }
        asked_ago = {runner: ticks - (until - _START_S) for runner, until in starting.items()}
        both = registered_ago.keys() & asked_ago.keys()
        return {runner for runner in both if registered_ago[runner] <= asked_ago[runner]}

    def _registered_before(self, pool: str, known: Mapping[str, bool]) -> set[str]:
        """Return the running runners registered with an earlier master.

        They have registered since their token was made: names are used again.
        """
        made_at = {
            token.name.removeprefix(_TOKEN_PREFIX): token.created_at
            for token in self._tokens.list()
            if token.name.startswith(_TOKEN_PREFIX) and not token.is_revoked
        }
        return {
            node.name
            for node in self._nodes.all()
            if node.facts.pool == pool
            and known.get(node.name)
            and node.registered_at >= made_at.get(node.name, math.inf)
        }

    def _order(self, name: str, pool: PoolDefinition, runner: str) -> RunnerOrder:
        # Earlier runner of the same name has ended, so its token must not be usable any more.
        for token in self._tokens.list():
            if token.name == _TOKEN_PREFIX + runner and token.is_usable:
                self._tokens.revoke(token.id).result()
        made = self._tokens.create(
            _TOKEN_PREFIX + runner, TokenScope.RUNNER, _TOKEN_LIFE_S, node=runner, pool=name
        )
        _, secret = made.result()
        url = pool.url or self._address.url
        kind = f"{STARTER_LABEL}={pool.starter}"
        command = [
            pool.python, "-m", "paceline.cli", "runner", "--master", url, "--pool", name,
            "--labels", kind, "--slots", str(pool.slots or "auto"),
            "--idle-timeout", f"{pool.idle_timeout:g}", "--check-every", f"{pool.check_every:g}",
        ]  # fmt: skip
        return RunnerOrder(
            name=runner,
            url=url,
            token=secret,
            node_key=make_secret(),
            certificate=self._address.certificate,
            command=tuple(command),
        )

    def _note_ended(self, pool: str, names: set[str]) -> None:
        """Report the ended runners to the master, to avoid waiting for their leases."""
        for node in self._nodes.all():
            is_ours = node.facts.pool == pool and STARTER_LABEL in node.facts.labels
            if is_ours and node.name not in names and not self._nodes.presence.is_lost(node.id):
                self._nodes.presence.note_ended(node.id)

    def _revoke(self, pool: str, names: set[str]) -> None:
        """Revoke the tokens of a pool's ended runners."""
        for token in self._tokens.list():
            runner = token.name.removeprefix(_TOKEN_PREFIX)
            is_ours = token.name.rpartition("-")[0] == _TOKEN_PREFIX + pool
            if is_ours and runner not in names and token.is_usable:
                self._tokens.revoke(token.id).result()

    def _revoke_left(self, pool: str) -> None:
        """Revoke the tokens of a pool's runners after they announced their end."""
        for node in self._nodes.all():
            if node.token_id is None or node.facts.pool != pool:
                continue
            token = self._tokens.get(node.token_id)
            is_ours = token is not None and token.name == _TOKEN_PREFIX + node.name
            if (
                token is not None
                and is_ours
                and token.is_usable
                and self._nodes.presence.has_left(node.id)
            ):
                self._tokens.revoke(token.id).result()
