"""Alerts: what a training wants people to see."""

import logging
import time

from paceline.journal import ALERT_LEVELS, AlertRaised

logger = logging.getLogger(__name__)

_LONGEST = {"title": 200, "description": 4000}
_LOGGED_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


def alert_of(title: str, description: str, level: str) -> AlertRaised:
    """Return the record of an alert.

    Raises:
        TypeError: A text is no string.
        ValueError: `level` is unknown, or there is no text, or a text is too long.
    """
    for name, text in (("title", title), ("description", description)):
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must be a string, but got {text!r}.")
        if len(text) > _LONGEST[name]:
            raise ValueError(
                f"`{name}` must have {_LONGEST[name]} characters at most, but has {len(text)}."
            )
    if not title and not description:
        raise ValueError("An alert must have a `title` or a `description`, but has neither.")
    if level not in ALERT_LEVELS:
        raise ValueError(f"`level` must be one of {', '.join(ALERT_LEVELS)}, but got {level!r}.")
    return AlertRaised(time=time.time(), title=title, description=description, level=level)


def log_alert(alert: AlertRaised, rank: int) -> None:
    """Log an alert, for runs that have no trial's log."""
    text = ": ".join(filter(None, (alert.title, alert.description)))
    logger.log(_LOGGED_LEVELS[alert.level], "Alert of rank %d: %s", rank, text)
