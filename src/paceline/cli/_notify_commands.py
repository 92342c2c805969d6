"""Commands `paceline notify`: channels for messages to people."""

from typing import Annotated

import typer

from paceline.cli._command_classes import CommandGroup
from paceline.cli._console_output import print_answer, print_list
from paceline.cli._options_and_errors import CommandError, connect

notify_app = CommandGroup(help="Show and test the channels for messages to people.")


@notify_app.command("list", is_list=True)
def list_channels() -> None:
    """List the channels of `notify.yaml` in the master's home, without addresses."""
    with connect() as client:
        channels = client.notify_channels()
    print_list(
        channels,
        ["Channel", "Kind", "Waiting", "Given up", "Failure"],
        [
            (one.name, one.kind, one.num_waiting, one.num_dropped, one.failure or "")
            for one in channels
        ],
        right=["Waiting", "Given up"],
        empty="The master has no channels. `notify.yaml` in its home has them.",
    )


@notify_app.command("test")
def test_channel(
    channel: Annotated[str, typer.Argument(metavar="CHANNEL", help="Name of the channel.")],
) -> None:
    """Send a test message to a channel now."""
    with connect() as client:
        outcome = client.test_notify_channel(channel)
    if outcome.failure is not None:
        raise CommandError(f"The message to {channel} could not be sent: {outcome.failure}.")
    print_answer(outcome, f"Sent a test message to {channel}.")
