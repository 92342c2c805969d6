"""What is left of an attempt's processes when its runner has died."""

import logging

import msgspec

from paceline.runner._attempt_directory import AttemptDirectory
from paceline.workers import end_marked, kill_leftover

logger = logging.getLogger(__name__)


def end_leftovers(directory: AttemptDirectory) -> None:
    """End what is left of an attempt's processes, wherever they have gone."""
    try:
        process = directory.read_process()
        if process is not None:
            kill_leftover(*process)
    except (msgspec.DecodeError, ValueError) as error:
        logger.error("The processes of the earlier runner are not known: %s", error)
    try:
        mark = directory.read_spec().mark
    except (OSError, msgspec.DecodeError):
        return
    if mark is not None and (num_ended := end_marked(mark)):
        logger.warning("%d processes that the attempt had left were ended.", num_ended)
