"""Checks of a node that registers: version, token, pool, key and name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import paceline
from paceline._base.exceptions import PicklableError
from paceline._cluster.master.authentication import StoredToken
from paceline._cluster.master.scheduling.pools import NodeSlots, PoolSettings, pool_of
from paceline._cluster.messages.runner_messages import DEFAULT_POOL, PROTOCOL, NodeFacts


class NodeRefusedError(PicklableError, RuntimeError):
    """Raised when a registration or a poll is refused.

    Args:
        code: A short name of the reason.
        message: One sentence for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredNode:
    """Node in its stored form.

    Args:
        seen_at: The time of its last sign of life before it was lost or left, or of its
            registration.
        has_left: It has said that it leaves, and has not come back.
    """

    id: int
    name: str
    key: str
    session: int
    token_id: int | None
    facts: NodeFacts
    is_draining: bool
    registered_at: float
    seen_at: float | None = None
    has_left: bool = False

    def slots(
        self,
        *,
        can_join: bool,
        is_open: bool = True,
        only_pool: str | None = None,
        is_drained: bool = False,
        problem: str = "",
        owner: str = "",
    ) -> NodeSlots:
        """Return the slots of this node for the scheduler."""
        slots = tuple(range(len(self.facts.devices)))
        return NodeSlots(
            node_id=self.id,
            slots=slots,
            drained=frozenset(slots if is_drained else ()),
            pool=self.facts.pool,
            labels=self.facts.labels,
            is_open=is_open,
            can_join=can_join,
            only_pool=only_pool,
            problem=problem,
            owner=owner,
            packages=None if (own := self.facts.packages) is None else frozenset(own),
        )


_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?![0-9])[A-Za-z0-9.+_-]{0,60}")


def version_problem(facts: NodeFacts) -> str:
    """Return why a runner gets no attempts by its version; empty if it gets some.

    It may be one minor version behind, so that a master is upgraded first, and its runners then.
    """
    mine, found = paceline.__version__, _VERSION.fullmatch(facts.version)
    # A stranger's text.
    theirs_text = facts.version if found else repr(facts.version)[:60]
    text = f"version: the runner has Paceline {theirs_text} (protocol {facts.protocol})"
    update = f"pip install paceline=={mine} there, and start it again"
    if facts.protocol != PROTOCOL:
        return f"{text}, but the master {mine} speaks protocol {PROTOCOL}. Hint: {update}"
    if facts.version == mine:
        return ""
    if found is None or (known := _VERSION.fullmatch(mine)) is None:
        return f"{text}, but must have the version of the master, {mine}. Hint: {update}"
    theirs, own = (tuple(int(number) for number in one.groups()) for one in (found, known))
    if theirs > own:
        return f"{text}, newer than the master, {mine}. Hint: upgrade the master first, or {update}"
    if theirs in (own, (own[0], own[1] - 1)):
        return ""
    return f"{text}, but may be at most one minor version behind the master, {mine}. Hint: {update}"


def check_node_version(facts: NodeFacts) -> None:
    """Refuse a runner of a version that does not fit.

    Raises:
        NodeRefusedError: It has such a one.
    """
    if problem := version_problem(facts):
        raise NodeRefusedError("other_version", f"The node {facts.name!r} is refused. {problem}.")


_NEW_TOKEN = "`paceline token create NAME --scope runner"  # noqa: S105 - a command


def check_token_node(token: StoredToken | None, facts: NodeFacts) -> None:
    """Refuse a runner with a token bound to another node.

    Args:
        token: The token of the runner; None is the home's own.
        facts: The runner's own facts.

    Raises:
        NodeRefusedError: The token is for another node.
    """
    if token is None or token.node in (None, facts.name):
        return
    raise NodeRefusedError(
        "other_node",
        f"The runner must register as {token.node!r}, the only node of its token {token.name!r},"
        f" but got {facts.name!r}. Hint: start it with `--name {token.node}`, or make a token for"
        f" this node on the machine of the master: {_NEW_TOKEN} --node {facts.name}`.",
    )


def check_token_pool(
    token: StoredToken | None, facts: NodeFacts, pools: Mapping[str, PoolSettings]
) -> None:
    """Refuse a runner with a node outside its token's pool.

    Args:
        token: The token of the runner; None is the home's own.
        facts: The runner's own facts.
        pools: The settings of the pools, whose labels choose among the nodes that name none.

    Raises:
        NodeRefusedError: The node is in another pool.
    """
    if token is None or token.pool is None:
        return
    pool = pool_of(facts.pool, facts.labels, pools)
    if pool == token.pool:
        return
    by_labels = pool != facts.pool
    other = (
        "start it without the labels of that pool"
        if by_labels and token.pool == DEFAULT_POOL
        else f"start it with `--pool {token.pool}`"
    )
    raise NodeRefusedError(
        "other_pool",
        f"The node {facts.name!r} must be in {token.pool!r}, the only pool of its token"
        f" {token.name!r}, but is in {pool!r}{' by its labels' if by_labels else ''}. Hint:"
        f" {other}, or make a token for this pool on the machine of the master: {_NEW_TOKEN}"
        f" --pool {pool}`.",
    )


def check_bound_key(known: NodeFacts, facts: NodeFacts) -> None:
    """Refuse another machine the name of a node with a bound token, even if the node is lost.

    Args:
        known: The facts of the runner that registered the node.
        facts: The facts of this runner.

    Raises:
        NodeRefusedError: It has another directory.
    """
    if known.key == facts.key:
        return
    raise NodeRefusedError(
        "name_taken",
        f"The node {facts.name!r} was registered by a token for it alone, so its runner must have"
        " the same directory as then, but it has another one. Hint: start it with the `--dir` that"
        f" it had. If that is lost, run `paceline runner forget {facts.name}` on the machine of the"
        " master once the node is lost, and start the runner again.",
    )


def check_name_owner(
    known: NodeFacts, facts: NodeFacts, token: StoredToken | None, *, has_other_token: bool
) -> None:
    """Refuse a present node's name to another machine, or to a sender with another token.

    Args:
        known: The facts of the runner that registered the node.
        facts: The facts of this runner.
        token: Its token; None is the home's own.
        has_other_token: Whether the node belongs to another token, which can still be used.

    Raises:
        NodeRefusedError: It is another machine, or has another token than one for this node alone.
    """
    is_bound = token is not None and token.node is not None
    if known.key != facts.key:
        way_out = (
            f"if that is not your machine, revoke its token or `paceline runner drain"
            f" {facts.name}`, and then `paceline runner forget {facts.name}`"
            if is_bound
            else "choose another name by `--name`, or wait until that one is lost"
        )
        raise NodeRefusedError(
            "name_taken",
            f"The name {facts.name!r} belongs to a runner with another directory on"
            f" {known.host!r}, which is not lost. Hint: {way_out}.",
        )
    # Exception for bound tokens: a token for this node alone is a new token of the same machine.
    if has_other_token and not is_bound:
        raise NodeRefusedError(
            "other_token",
            f"The node {facts.name!r} belongs to another token. Hint: use that one, or revoke it.",
        )


def check_pool_of_known(
    token: StoredToken | None,
    known: NodeFacts,
    facts: NodeFacts,
    pools: Mapping[str, PoolSettings],
) -> None:
    """Refuse another machine the name of a lost node outside its token's pool.

    Attempts of that pool may still wait for the node.

    Args:
        token: The token of the runner; None is the home's own.
        known: The facts of the runner that registered the node.
        facts: The facts of this runner.
        pools: The settings of the pools.

    Raises:
        NodeRefusedError: The node was in another pool.
    """
    if token is None or token.pool is None or known.key == facts.key:
        return
    pool = pool_of(known.pool, known.labels, pools)
    if pool != token.pool:
        other_name = "" if token.node else "choose another name by `--name`, or "
        raise NodeRefusedError(
            "name_taken",
            f"There is a lost node {facts.name!r} in the pool {pool!r}, whose name a runner in the"
            f" pool {token.pool!r} must not take; the token {token.name!r} is for that pool alone."
            f" Hint: {other_name}run `paceline runner forget {facts.name}` on the machine of the"
            " master.",
        )


def is_as_before(known: NodeFacts, facts: NodeFacts) -> bool:
    """Return whether a runner registers again with unchanged key, pool and labels."""
    return (known.key, known.pool, known.labels) == (facts.key, facts.pool, facts.labels)
