"""Data that tell what they are: a checkpoint within an epoch goes on with the same ones."""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.storage import CheckpointMismatchError

_NAMES_SHOWN = 3


def check_identity(
    stored: Mapping[str, Any] | None,
    present: Mapping[str, Any] | None,
    *,
    is_within_epoch: bool,
    warn: Callable[[str], None],
) -> None:
    """Compare the data of a checkpoint with the present ones.

    Args:
        stored: The identity of the data of the checkpoint; None if they had none.
        present: That of the present data.
        is_within_epoch: Whether the checkpoint lies within an epoch. If not, other data are only
            told of.
        warn: Called with what to tell of other data.

    Raises:
        CheckpointMismatchError: They differ within an epoch; the message names the files.
    """
    if not stored or not present or _key(stored) == _key(present):
        return
    difference = _data_difference(stored, present)
    if is_within_epoch:
        raise CheckpointMismatchError(
            "The data must be those that the checkpoint was saved with, as it lies within an epoch,"
            f" but {difference}. Hint: give the data as they were, or go on with a checkpoint of"
            " the end of an epoch."
        )
    warn(f"The next epoch has other data than those before the checkpoint: {difference}.")


def _key(identity: Mapping[str, Any]) -> tuple[Any, ...]:
    return identity["digest"], identity.get("window"), identity.get("selection")


def _data_difference(stored: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    before, now = stored["prints"], present["prints"]
    name = present["name"]
    if stored["digest"] == present["digest"]:
        windows = stored.get("window"), present.get("window")
        if windows[0] == windows[1]:
            return f"`filter`, `split` or `to_cv` has selected other samples of {name!r}"
        return (
            f"of {name!r} other samples are mixed with each other (a window of {windows[0]} then,"
            f" of {windows[1]} now)"
        )
    parts = [
        f"{what} {_shown(names)}"
        for what, names in (
            ("changed:", [each for each in before if each in now and before[each] != now[each]]),
            ("missing:", [each for each in before if each not in now]),
            ("new:", [each for each in now if each not in before]),
        )
        if names and before and now
    ]
    counts = (
        f"{stored['files']} files with {stored['samples']} samples then, {present['files']} with"
        f" {present['samples']} now"
    )
    return f"{name!r} is not what it was ({'; '.join([*parts, counts])})"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{names[:_NAMES_SHOWN]}{more}"
