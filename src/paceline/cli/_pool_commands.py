"""`paceline pool`: how the slots of a pool are shared."""

from typing import Annotated, Literal

import typer

from paceline.cli._command_options import Json
from paceline.cli._runner_commands import read_labels
from paceline.cli._slot_texts import labels_text, slots_text

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Show and set how pools are shared."
)

_Pool = Annotated[str, typer.Argument(metavar="POOL", help="Name of the pool.")]


@app.command("list")
def list_pools(json: Json = False) -> None:
    """List the pools that have nodes or settings, or whose runners the master starts."""
    from paceline.cli._connection import connect
    from paceline.cli._console_output import print_json, print_table

    with connect() as client:
        pools = client.pools()
    if json:
        print_json(pools)
        return
    print_table(
        ["Pool", "Policy", "Nodes", "Slots", "Limit", "Labels"],
        [
            (
                pool.name,
                pool.policy,
                pool.num_nodes,
                slots_text(pool, pool.num_slots),
                pool.max_slots,
                labels_text(pool.labels),
            )
            for pool in pools
        ],
        right=["Nodes", "Slots", "Limit"],
        empty="The master has no pools.",
    )
    for pool in pools:
        if pool.failure is not None:
            typer.echo(f"Pool {pool.name}: {pool.failure}", err=True)
        elif pool.detail is not None:
            typer.echo(f"Pool {pool.name}: {pool.detail}")


@app.command("set")
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
) -> None:
    """Set all settings of a pool. Options that are not given get their defaults."""
    from paceline.cli._connection import connect

    with connect() as client:
        client.set_pool(name, policy=policy, max_slots=max_slots, labels=read_labels(labels or []))
    typer.echo(f"The pool {name} has the policy {policy}.")


@app.command("reset")
def reset_pool(name: _Pool) -> None:
    """Remove the settings of a pool: first come, first served, without a limit."""
    from paceline.cli._connection import connect

    with connect() as client:
        client.reset_pool(name)
    typer.echo(f"The pool {name} has its default settings.")
