"""Commands `paceline runner` and `paceline pool`: nodes, and the sharing of their slots."""

import logging
import re
import signal
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli import _console_output as console
from paceline.cli._command_groups import CommandGroup
from paceline.cli._commands.slot_queue_and_quota_commands import (
    labels_text,
    memory_text,
    slots_text,
)
from paceline.cli._completions import complete_node, complete_pool
from paceline.cli._connection import chosen_master, connect, restart_without_token, trust
from paceline.cli._errors import CommandError
from paceline.cli._options import CaFile, output_format

if TYPE_CHECKING:
    from paceline._cluster.messages.master_models import Node, Pool
    from paceline.client._client import Client
from paceline.cli._commands.slot_queue_and_quota_commands import read_labels
from paceline.cli._connection import check_token_file

runner_app = CommandGroup(
    no_args_is_help=False,
    invoke_without_command=True,
    help="Run trials of a master on this machine, or manage its nodes.",
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_STILL_RUNS = (
    " If its runner still runs, it registers again by itself, and gets trials. Hint: stop the"
    " runner on that machine, by Ctrl-C or SIGTERM."
)
_Name = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of the node.", autocompletion=complete_node)
]


@runner_app.callback()
def run(
    context: typer.Context,
    master: Annotated[
        str | None,
        typer.Option(
            "--master", metavar="URL", help="Address of the master, such as https://head:8080."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with a token of the scope `runner`, which only its owner may read.",
        ),
    ] = None,
    idle_timeout: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="Leave after SECONDS without a trial. Default: never."
        ),
    ] = None,
    check_every: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Check this machine at the start and every SECONDS; 0 is never.",
        ),
    ] = 1800.0,
    ca_file: CaFile = None,
    slots: Annotated[
        str,
        typer.Option(
            metavar="N", help="Number of slots; `auto` is one per GPU, or else one per CPU core."
        ),
    ] = "auto",
    pool: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Pool of the node; see `resources.pool`. In the pool `default`, `--labels` may"
            " choose another one: see `paceline pool set --labels`.",
        ),
    ] = "default",
    labels: Annotated[
        list[str] | None,
        typer.Option("--labels", metavar="KEY=VALUE", help="A label of the node. Repeatable."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the node. The default is the host name."),
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            help="Address at which other nodes reach this one, for trials on several nodes. The"
            " default is the one that the master sees.",
        ),
    ] = "",
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Directory of the runner. The default is ~/.paceline-runner/NAME.",
        ),
    ] = None,
) -> None:
    """Run trials of a master on this machine until Ctrl-C, or manage the master's nodes."""
    if context.invoked_subcommand is not None:
        return
    restart_without_token()
    if ca_file is not None:
        trust(ca_file)
    master = master or chosen_master.get()
    if master is None or token_file is None:
        raise CommandError(
            "`paceline runner` needs the address of a master and a token. Hint: `paceline runner"
            " --master URL --token-file FILE`; `paceline token create NAME --scope runner` makes"
            " the token on the machine of the master."
        )
    node = name or _host_name()
    _check_names(node, pool)
    check_token_file(token_file)
    _serve_node(
        master if "://" in master else f"http://{master}",
        token_file,
        (directory or Path("~/.paceline-runner") / node).expanduser().absolute(),
        {"idle_timeout_s": idle_timeout, "check_every_s": check_every},
        {
            "name": node,
            "pool": pool,
            "labels": read_labels(labels or []),
            "num_slots": _runner_slots(slots),
            "address": address,
        },
    )


def _serve_node(
    master: str,
    token_file: Path,
    directory: Path,
    limits: dict[str, float | None],
    settings: dict[str, object],
) -> None:
    from paceline._cluster.runner.node_facts import find_facts
    from paceline._cluster.runner.node_runner import NodeRunner

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s: %(message)s")
    token_file = token_file.expanduser().absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = find_facts(directory, **settings)  # type: ignore[arg-type]
        runner = NodeRunner(master, token_file, directory, facts, **limits)  # type: ignore[arg-type]
    except ValueError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(
            f"The runner must be able to write to {str(directory)!r}, but: {error}."
        ) from error
    signal.signal(signal.SIGINT, lambda _number, _frame: runner.stop())
    signal.signal(signal.SIGTERM, lambda _number, _frame: runner.leave())
    runner.run()


@runner_app.command("list", is_list=True)
def list_nodes() -> None:
    """List the nodes, the master's own machine among them, with their slots and trials."""

    with connect() as client:
        nodes = client.nodes(include_local=True)
        trials = _trials_by_node(client)
    rows = [
        {
            "Node": node.name,
            "State": _state_of(node),
            "Pool": node.pool,
            "Labels": labels_text(node.labels),
            "Slots": slots_text(node, len(node.devices)),
            "Device": node.device_kind,
            "GPU memory": memory_text(node.device_memory_bytes),
            "Memory": console.format_bytes(node.memory_bytes),
            "Address": node.address,
            "Trials": ", ".join(map(str, sorted(trials.get(node.name, ())))),
            "Seen": console.Age(node.seen_at),
            "Reserved": "; ".join(
                f"{one.id}: {one.user} {console.format_moment(one.begins_at)} to"
                f" {console.format_moment(one.ends_at)}"
                for one in node.reservations
            ),
        }
        for node in nodes
    ]
    # A terminal is narrow: columns without any value are left out.
    titles = [title for title in (rows or [{}])[0] if any(row[title] for row in rows)]
    console.print_list(
        nodes,
        titles,
        [[row[title] for title in titles] for row in rows],
        right=["Slots", "GPU memory", "Memory"],
        shortened=["Device", "Labels"],
        empty="The master has no slots, and no other machine has registered. `paceline runner` on"
        " one does, and so do the runners of pools that start some: `paceline pool list`.",
    )


def _state_of(node: "Node") -> str:
    """Return the state of a node as text, with the reason or the seconds of its rest."""
    if node.problem:
        return f"{node.state}, rests: {node.problem}"
    rest_s = (node.rests_until or 0.0) - time.time()
    return f"{node.state}, rests {rest_s:.0f} s" if rest_s > 0 else node.state


def _trials_by_node(client: "Client") -> dict[str, set[int]]:
    trials: dict[str, set[int]] = {}
    for slot in client.slots():
        if slot.trial_id is not None:
            trials.setdefault(slot.node, set()).add(slot.trial_id)
    return trials


@runner_app.command("drain")
def drain(
    name: _Name,
    finish: Annotated[
        bool, typer.Option("--finish", help="Let trials that run there end there.")
    ] = False,
) -> None:
    """Place no more trials on a node. Its trials store checkpoints and continue elsewhere."""

    with connect() as client:
        client.drain_node(name, finish=finish)
        undo = f"`paceline runner resume {name}` undoes it."
        _print_node(client, name, f"The node {name} gets no more trials. {undo}")


def _print_node(client: "Client", name: str, text: str) -> None:

    nodes = {node.name: node for node in client.nodes(include_local=True)}
    console.print_answer(nodes.get(name), text)


@runner_app.command("resume")
def resume(name: _Name) -> None:
    """Use a drained node again."""

    with connect() as client:
        client.resume_node(name)
        _print_node(client, name, f"The node {name} gets trials again.")


@runner_app.command("reserve")
def reserve(
    name: _Name,
    user: Annotated[str, typer.Option("--for", metavar="USER", help="Whose trials may start.")],
    until: Annotated[
        str, typer.Option("--until", metavar="TIME", help="Its end, such as 2026-12-04T18:00.")
    ],
    begin: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Its beginning. Default: now.")
    ] = None,
) -> None:
    """Reserve a node for a user. Trials of others leave when it begins, with a checkpoint."""

    begins_at = time.time() if begin is None else _moment("--from", begin)
    ends_at = _moment("--until", until)
    with connect() as client:
        made = client.reserve_node(name, user=user, begins_at=begins_at, ends_at=ends_at)
    undo = f"`paceline runner release {name} {made.id}` undoes it."
    console.print_answer(made, f"The node {name} is reserved for {user}. {undo}")


def _moment(option: str, text: str) -> float:
    """Return a local time, or one with an offset, in seconds since the epoch."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise CommandError(
            f"`{option}` must be a time such as 2026-12-04T18:00, but got {text!r}."
        ) from error


@runner_app.command("release")
def release(
    name: _Name,
    reservation: Annotated[
        int, typer.Argument(metavar="RESERVATION", min=1, help="Its number in `runner list`.")
    ],
) -> None:
    """End a reservation of a node, also before it began."""

    with connect() as client:
        client.end_reservation(name, reservation)
    answer = {"node": name, "id": reservation}
    console.print_answer(answer, f"The reservation {reservation} of the node {name} is over.")


@runner_app.command("forget")
def forget(name: _Name) -> None:
    """Forget a node in the state lost, left or drained."""

    with connect() as client:
        state = next((node.state for node in client.nodes() if node.name == name), None)
        client.forget_node(name)
    still = "" if state == "left" else _STILL_RUNS
    console.print_answer({"name": name, "state": state}, f"The node {name} is forgotten.{still}")


def _host_name() -> str:
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:63].lstrip("_.-")
    return name or "node"


def _check_names(node: str, pool: str) -> None:
    if not _NAME.fullmatch(node) or not _NAME.fullmatch(pool):
        raise CommandError(
            "`--name` and `--pool` must be up to 63 letters, digits, dots, hyphens and"
            f" underscores, but got {node!r} and {pool!r}."
        )


def _runner_slots(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise CommandError(f"`--slots` must be a number from 1 on, or auto, but got {text!r}.")
    return int(text)


pool_app = CommandGroup(help="Show and set how pools are shared.")

_Pool = Annotated[
    str, typer.Argument(metavar="POOL", help="Name of the pool.", autocompletion=complete_pool)
]


@pool_app.command("list", is_list=True)
def list_pools() -> None:
    """List the pools with nodes, with settings, or with runners started by the master."""

    with connect() as client:
        pools = client.pools()
    console.print_list(
        pools,
        ["Pool", "Policy", "Nodes", "Slots", "Limit", "Labels", "Rules"],
        [
            (
                pool.name,
                _policy_text(pool),
                pool.num_nodes,
                slots_text(pool, pool.num_slots),
                pool.max_slots,
                labels_text(pool.labels),
                _rules_text(pool),
            )
            for pool in pools
        ],
        right=["Nodes", "Slots", "Limit"],
        empty="The master has no pools.",
    )
    for pool in pools:
        if pool.failure is not None:
            typer.echo(f"Pool {pool.name}: {pool.failure}", err=True)
        elif pool.detail is not None and output_format.get() == "table":
            typer.echo(f"Pool {pool.name}: {pool.detail}")


def _policy_text(pool: "Pool") -> str:
    half_life = f", half-life {pool.half_life_hours:g} h" if pool.half_life_hours else ""
    return f"{pool.policy}{half_life}{', backfill' * pool.backfill}"


def _rules_text(pool: "Pool") -> str:
    rules = (
        (f"open to {', '.join(pool.open_to)}", pool.open_to),
        (f"best priority {pool.best_priority}", pool.best_priority),
        ("own runners", pool.own_runners),
        (f"interactive first {pool.interactive_first}", pool.interactive_first),
        (f"silent after {pool.silent_after_s or 0:g} s", pool.silent_after_s),
        (f"unused after {pool.unused_after_s or 0:g} s", pool.unused_after_s),
        (f"pause after {pool.pause_after_s or 0:g} s", pool.pause_after_s),
    )
    return "; ".join(text for text, value in rules if value)


def _pool_time(option: str, text: str | None) -> float | None:
    from paceline._base.arguments_and_errors import AGE_FORMS, seconds_of

    seconds = None if text is None else seconds_of(text)
    if text is not None and seconds is None:
        raise CommandError(f"`{option}` must be {AGE_FORMS}, but got {text!r}.")
    return seconds


@pool_app.command("set")
def set_pool(
    name: _Pool,
    policy: Annotated[
        Literal["fifo", "priority", "fair_share"],
        typer.Option(help="Which trial gets slots next: the oldest one; by priority; by weight."),
    ] = "fifo",
    max_slots: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many of its slots may be in use at once."),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--labels",
            metavar="KEY=VALUE",
            help="Nodes with this label belong to it, unless they name a pool. Repeatable.",
        ),
    ] = None,
    backfill: Annotated[
        bool,
        typer.Option(
            "--backfill",
            help="Run trials in the gap in front of one that needs more slots than are free.",
        ),
    ] = False,
    half_life: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=10_000,
            metavar="HOURS",
            help="Under fair_share: past use of users counts by half for each so many hours."
            " Default: not at all.",
        ),
    ] = None,
    silent_after: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Alert if a trial reports nothing for TIME, such as 30min."
        ),
    ] = None,
    unused_after: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Alert if a trial does not use its slots for TIME."),
    ] = None,
    pause_after: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Pause its experiment TIME after such an alert."),
    ] = None,
    open_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHO",
            help="Take trials only of this user, @group or project:NAME. Repeatable.",
        ),
    ] = None,
    best_priority: Annotated[
        int | None,
        typer.Option(
            min=1, max=99, metavar="N", help="Priority that only project administrators exceed."
        ),
    ] = None,
    own_runners: Annotated[
        bool, typer.Option("--own-runners", help="Start trials only on runners of their user.")
    ] = False,
    interactive_first: Annotated[
        str | None,
        typer.Option(
            metavar="HOURS",
            help="Hours in which interactive trials come first, such as '09:00-18:00 mon-fri"
            " Europe/Berlin'. Default days: all; default time zone: UTC.",
        ),
    ] = None,
) -> None:
    """Set all settings of a pool. Options not given get their defaults."""

    if half_life is not None and policy != "fair_share":
        raise CommandError(f"`--half-life` is for the policy fair_share, but got {policy}.")
    with connect() as client:
        client.set_pool(
            name,
            policy=policy,
            max_slots=max_slots,
            labels=read_labels(labels or []),
            backfill=backfill,
            half_life_hours=half_life,
            silent_after_s=_pool_time("--silent-after", silent_after),
            unused_after_s=_pool_time("--unused-after", unused_after),
            pause_after_s=_pool_time("--pause-after", pause_after),
            open_to=open_to or [],
            best_priority=best_priority,
            own_runners=own_runners,
            interactive_first=interactive_first,
        )
        gaps = ", and its gaps are filled" if backfill else ""
        _print_pool(client, name, f"The pool {name} has the policy {policy}{gaps}.")


def _print_pool(client: "Client", name: str, text: str) -> None:

    pools = {pool.name: pool for pool in client.pools()}
    console.print_answer(pools.get(name), text)


@pool_app.command("reset")
def reset_pool(name: _Pool) -> None:
    """Remove the settings of a pool: first come, first served, without a limit."""

    with connect() as client:
        client.reset_pool(name)
        _print_pool(client, name, f"The pool {name} has its default settings.")
