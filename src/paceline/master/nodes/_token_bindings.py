"""What the token of a runner is bound to: the one node that it registers, its pool, or neither."""

from collections.abc import Mapping

from paceline.master.auth import StoredToken
from paceline.master.nodes._registered_node import NodeRefusedError
from paceline.master.scheduling import PoolSettings, pool_of
from paceline.messages.node_runners import DEFAULT_POOL, NodeFacts

_NEW_TOKEN = "`paceline token create NAME --scope runner"  # noqa: S105 - a command


def check_node_of_token(token: StoredToken | None, facts: NodeFacts) -> None:
    """Refuse a runner whose token is for another node.

    Args:
        token: The token of the runner; None is the home's own.
        facts: What the runner says.

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


def check_pool_of_token(
    token: StoredToken | None, facts: NodeFacts, pools: Mapping[str, PoolSettings]
) -> None:
    """Refuse a runner whose node is in another pool than that of its token.

    Args:
        token: The token of the runner; None is the home's own.
        facts: What the runner says.
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


def check_key_of_bound(known: NodeFacts, facts: NodeFacts) -> None:
    """Refuse another machine the name of a node that a token is for, even if it is lost.

    Args:
        known: What the runner said that has registered the node.
        facts: What this one says.

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


def check_owner_of_name(
    known: NodeFacts, facts: NodeFacts, token: StoredToken | None, *, has_other_token: bool
) -> None:
    """Refuse the name of a node that is not lost to another machine or by another token.

    Args:
        known: What the runner said that has registered the node.
        facts: What this one says.
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
    # One for this node alone is a new token of the same machine.
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
    """Refuse another machine the name of a lost node in another pool than that of its token.

    Attempts of that pool may still wait for the node.

    Args:
        token: The token of the runner; None is the home's own.
        known: What the runner said that has registered the node.
        facts: What this one says.
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
    """Tell whether a runner registers again, for the pool and with the labels that it had."""
    return (known.key, known.pool, known.labels) == (facts.key, facts.pool, facts.labels)
