"""`paceline slot`: the devices that trials run on."""

import typer

from paceline.cli._options import Json

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show the devices for trials.")


@app.callback()
def slot() -> None:
    """Show the devices that trials run on."""


@app.command("list")
def list_slots(json: Json = False) -> None:
    """List the slots with their trials."""
    from paceline.cli._connection import connect
    from paceline.cli._output import print_json, print_table

    with connect() as client:
        slots = client.slots()
    if json:
        print_json(slots)
        return
    print_table(
        ["Node", "Slot", "Device", "Experiment", "Trial"],
        [(s.node, s.id, s.device, s.experiment_id, s.trial_id) for s in slots],
        right=["Slot", "Experiment", "Trial"],
        empty="The master has no slots.",
    )
