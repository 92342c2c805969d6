"""Arguments of `Trainer.fit`, and what stands for those that are not given."""

import logging
from collections.abc import Mapping
from typing import Any

from paceline.engine import TrainUnit, searched_length

logger = logging.getLogger(__name__)

_POLICIES = ("best", "all", "none")


def first_argument(*values: Any) -> Any:
    """Return the first value that is given; None if none is."""
    return next((value for value in values if value is not None), None)


def checked_policy(policy: str) -> str:
    """Return which validations ask for a checkpoint.

    Raises:
        ValueError: There is no such policy.
    """
    if policy not in _POLICIES:
        raise ValueError(
            f"`checkpoint_policy` must be one of {', '.join(_POLICIES)}, but got {policy!r}."
        )
    return policy


def training_length(searcher: Mapping[str, Any], given: TrainUnit | None) -> TrainUnit:
    """Return how long to train in all: the searcher's length, or else the given one.

    Raises:
        ValueError: There is neither.
    """
    searched = searched_length(searcher)
    if searched is not None:
        if given is not None and given != searched:
            logger.info("The searcher's length %r is used instead of %r.", searched, given)
        return searched
    if given is None:
        raise ValueError(
            "`max_length` must be given without a searcher's length. Hint:"
            " fit(max_length=pytorch.Epoch(1))."
        )
    given.length  # noqa: B018  # raises for a schedule
    return given
