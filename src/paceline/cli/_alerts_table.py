"""Alerts of a training as a table."""

from collections.abc import Sequence
from typing import Protocol


class Alert(Protocol):
    """What is shown of an alert."""

    @property
    def time(self) -> float:
        """When it was raised, in seconds since the epoch."""

    @property
    def level(self) -> str:
        """How urgent it is."""

    @property
    def title(self) -> str:
        """A few words."""

    @property
    def description(self) -> str:
        """More about it."""


def print_alerts(alerts: Sequence[Alert]) -> None:
    """Print alerts, if there are any."""
    from paceline.cli._console_output import console, format_moment, print_table

    if not alerts:
        return
    rows = [
        (format_moment(alert.time), alert.level, alert_text(alert.title, alert.description))
        for alert in alerts
    ]
    console().print()
    print_table(["Time", "Level", "Alert"], rows)


def alert_text(title: str | None, description: str | None) -> str:
    """Return the text of an alert in one line."""
    return " ".join(": ".join(filter(None, (title, description))).split())
