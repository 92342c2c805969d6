"""`paceline slot`: the devices that trials run on."""

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli._command_options import Json
from paceline.cli._slot_texts import memory_text

if TYPE_CHECKING:
    from paceline.messages.nodes_and_slots import Slot

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Show and drain the devices for trials."
)


_Node = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of its node; `local` is the master's machine.")
]
_Slot = Annotated[int, typer.Argument(metavar="SLOT", min=0, help="Number of the slot.")]


@app.command("list")
def list_slots(json: Json = False) -> None:
    """List the slots with their trials."""
    from paceline.cli._connection import connect
    from paceline.cli._console_output import print_json, print_table

    with connect() as client:
        slots = client.slots()
    if json:
        print_json(slots)
        return
    has_memory = any(slot.memory_bytes for slot in slots)
    print_table(
        [
            *("Node", "Slot", "Device", *(["Memory"] if has_memory else [])),
            *("Pool", "State", "Experiment", "Trial"),
        ],
        [
            (
                *(slot.node, slot.id, slot.device),
                *([memory_text([slot.memory_bytes or 0])] if has_memory else []),
                *(slot.pool, _slot_state(slot), slot.experiment_id, slot.trial_id),
            )
            for slot in slots
        ],
        right=["Slot", "Memory", "Experiment", "Trial"],
        empty="The master has no slots.",
    )


@app.command("drain")
def drain(
    node: _Node,
    slot: _Slot,
    finish: Annotated[
        bool, typer.Option("--finish", help="Let a trial that runs there end there.")
    ] = False,
) -> None:
    """Place no more trials on a slot. Its trial stores a checkpoint and continues elsewhere."""
    from paceline.cli._connection import connect

    with connect() as client:
        client.drain_slot(node, slot, finish=finish)
    undo = f"`paceline slot resume {node} {slot}` undoes it."
    typer.echo(f"The slot {slot} of {node} gets no more trials. {undo}")


@app.command("resume")
def resume(node: _Node, slot: _Slot) -> None:
    """Use a drained slot again."""
    from paceline.cli._connection import connect

    with connect() as client:
        client.resume_slot(node, slot)
    typer.echo(f"The slot {slot} of {node} gets trials again.")


def _slot_state(slot: "Slot") -> str:
    if slot.is_drained:
        return "drained" if slot.trial_id is None else "draining"
    return "free" if slot.trial_id is None else "in use"
