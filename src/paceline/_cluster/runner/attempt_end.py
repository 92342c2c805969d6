"""End of an attempt on its node: judged, written, and sent with the last reports.

`attempt_processes` imports this module late.
"""

import contextlib
import logging
import time

import msgspec

from paceline import faults
from paceline._base.journal_records import AttemptFinished
from paceline._base.run_directory import JournalKey, RunDirectory
from paceline._cluster.messages.runner_messages import AttemptEnd
from paceline._cluster.messages.states import ErrorKind, ExitReason, end_kind
from paceline._cluster.runner.attempt_directory import AttemptDirectory, sends_checkpoints
from paceline._cluster.runner.master_link import (
    MasterBackoff,
    MasterLink,
    RefusedByMasterError,
    UnreachableError,
)
from paceline._cluster.runner.record_shipping import Shipper
from paceline._cluster.runner.trial_memories import keep_memory
from paceline._training.workers.processes.leftover_processes import end_marked, kill_leftover
from paceline.core._run_storage import discard_unfinished

logger = logging.getLogger(__name__)


def end_leftovers(directory: AttemptDirectory) -> None:
    """End all remaining processes of an attempt, whatever their session or parent."""
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
    # Processes that left their session or lost their parent still have the mark.
    if mark is not None and (num_ended := end_marked(mark)):
        logger.warning("%d processes that the attempt had left were ended.", num_ended)


# How long a runner whose attempt has ended tries to reach a master before it leaves the rest to
# the next one.
_LAST_WORDS_S = 5.0
_LONGEST_DETAIL = 4000
# A quick look that spares decoding all other records.
_FINISHED = b'"finished"'


def make_attempt_end(
    reason: ExitReason,
    *,
    code: int | None = None,
    signum: int | None = None,
    detail: str | None = None,
    is_launch_error: bool = False,
    at: float | None = None,
    kind: ErrorKind | None = None,
    store: str | None = None,
) -> AttemptEnd:
    """Return how an attempt ended.

    `is_launch_error` says that `detail` is a launcher's. `at` is in seconds since the epoch, now by
    default. `kind` follows from reason and code by default, and from a `store` that did not answer.
    """
    if store is not None:
        # A store without an answer may come back, and is no fault of the code.
        kind = ErrorKind.TRANSIENT
    return AttemptEnd(
        reason=reason,
        code=code,
        signal=signum,
        time=time.time() if at is None else at,
        detail=_sendable(detail),
        is_launch_error=is_launch_error,
        kind=kind or end_kind(reason, code == 0),
        store=store,
    )


def write_attempt_end(directory: AttemptDirectory, end: AttemptEnd) -> None:
    """Write how the attempt ended; the master gets the report even if the disk is full."""
    try:
        directory.write_end(end)
    except OSError as error:
        logger.error("How the attempt ended cannot be written: %s", error)


def report_failed_start(directory: AttemptDirectory, error: Exception) -> None:
    """Report the failed start of an attempt with an unreadable specification."""
    text = f"The attempt's specification cannot be read: {type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        directory.mark_started()
    # The next attempt gets a directory of its own: a power cut can have taken the last writes.
    end = make_attempt_end(ExitReason.START_FAILED, detail=text, kind=ErrorKind.TRANSIENT)
    write_attempt_end(directory, end)
    _ship_by_path(directory, end)


def ship_leftover_reports(directory: AttemptDirectory) -> None:
    """Send an earlier runner's leftover reports, and end its remaining processes."""
    # Processes first: they could still write records.
    end_leftovers(directory)
    discard_unfinished(directory.run)
    end = read_end(directory)
    if end is None:
        end = keep_memory(directory, _end_without_word(directory.run))
        write_attempt_end(directory, end)
    try:
        spec = directory.read_spec()
    except (OSError, msgspec.DecodeError):
        logger.exception("The attempt's specification cannot be read.")
        _ship_by_path(directory, end)
        return
    link = MasterLink.of_attempt(spec)
    shipper = Shipper(
        directory,
        spec.attempt_id,
        link,
        member=spec.member,
    )
    if sends_checkpoints(spec, directory.run):
        shipper.send_checkpoints()
    ship_end(shipper, end)


def read_end(directory: AttemptDirectory) -> AttemptEnd | None:
    """Return the attempt's stored end, None if there is no readable end."""
    try:
        return directory.read_end()
    except msgspec.DecodeError as error:
        logger.error("What was left of the attempt's end cannot be read: %s", error)
        return None


def read_attempt_finish(run: RunDirectory) -> AttemptFinished | None:
    """Return the final record of the chief's newest journal, None if the journal was cut off.

    After a full disk the count of lost reports may follow it.
    """
    chiefs = [key for key in run.journal_keys() if key.rank == 0]
    return _read_finish(run, chiefs[-1]) if chiefs else None


def _read_finish(run: RunDirectory, key: JournalKey) -> AttemptFinished | None:
    finish = None
    try:
        for entry in run.reader(key):
            # Most records need no decoding to see that they are others.
            if _FINISHED in entry.payload and isinstance(record := entry.decode(), AttemptFinished):
                finish = record
    except Exception as error:
        logger.error("The journal of rank %d cannot be read to its end: %s", key.rank, error)
    return finish


def read_failing_store(run: RunDirectory) -> str | None:
    """Return the unresponsive storage if the newest processes failed because of a storage.

    The first rank that failed by itself counts.
    """
    keys = run.journal_keys()
    newest = {(key.attempt, key.generation) for key in keys[-1:]}
    finishes = [
        finish
        for key in keys
        if (key.attempt, key.generation) in newest
        and (finish := _read_finish(run, key)) is not None
        and finish.outcome == "error"
        and not finish.is_consequence
    ]
    first = min(finishes, key=lambda finish: finish.time, default=None)
    return None if first is None else first.store


def ship_end(shipper: Shipper, end: AttemptEnd, lost: str | None = None) -> None:
    """Send the rest and the end, or leave them for the next master; `lost` reports lost output."""
    shipper.note_end(end)
    deadline = time.monotonic() + _LAST_WORDS_S
    backoff = MasterBackoff()
    while True:
        try:
            rest_error = _rest_error(shipper)
            output_error = shipper.ship_output()
            told = " ".join(text for text in (lost, output_error) if text) or None
            shipper.ship_end(_judged_end(end, shipper, rest_error, told))
            faults.reach("runner.end_shipped")
            if output_error is not None:
                shipper.keep_output()
            return
        except UnreachableError as error:
            # The next answer may come from another master, with other marks.
            shipper.forget_positions()
            if time.monotonic() > deadline:
                logger.info("The master is away (%s); the next one will ship the rest.", error)
                return
            time.sleep(backoff.next_s())
        except RefusedByMasterError as error:
            logger.error("The master does not take the attempt's end: %s", error)
            return


def _rest_error(shipper: Shipper) -> str | None:
    """Send the remaining records; return the error if sending can succeed neither now nor later.

    The end must arrive all the same, or the trial would wait for it for ever.
    """
    try:
        shipper.ship_records()
    except UnreachableError:
        raise
    except Exception as error:
        logger.exception("What the attempt left cannot be sent.")
        return str(error) or type(error).__name__
    return shipper.unreadable


def _judged_end(
    end: AttemptEnd, shipper: Shipper, rest_error: str | None, output_error: str | None
) -> AttemptEnd:
    """Return the end with the errors of the attempt's reports and output added.

    Records set aside and output that cannot be stored are named, and change nothing else. If the
    reports as a whole cannot be stored, the attempt has failed.
    """
    details = [end.detail, shipper.set_aside, shipper.unsent, output_error]
    if rest_error is not None or shipper.set_aside:
        # A resume from memory would leave a gap in the reports.
        end = msgspec.structs.replace(end, memory="")
    if rest_error is not None:
        details.append(f"What the attempt reported cannot be stored: {rest_error}")
        # Another attempt has another journal, so it is worth a restart.
        end = msgspec.structs.replace(end, code=end.code or 1, kind=ErrorKind.PERMANENT)
    detail = " ".join(text for text in details if text) or None
    return msgspec.structs.replace(end, detail=_sendable(detail))


def _end_without_word(run: RunDirectory) -> AttemptEnd:
    """Return the end of an attempt without a stored end, as far as the journal shows.

    An error of the code counts as the loss of the runner, which may have caused it: the code could
    not print any more.
    """
    finish = read_attempt_finish(run)
    if finish is None:
        return make_attempt_end(ExitReason.RUNNER_LOST)
    if finish.outcome == "error":
        detail = f"the runner died, and the code failed: {finish.error}"
        return make_attempt_end(ExitReason.RUNNER_LOST, detail=detail, at=finish.time)
    return make_attempt_end(ExitReason.EXITED, code=0, detail=finish.error, at=finish.time)


def _ship_by_path(directory: AttemptDirectory, end: AttemptEnd) -> None:
    """Send an end with the address derived from the path: ``<home>/attempts/<attempt id>``."""
    path = directory.path.absolute()
    if not path.name.isdecimal():
        logger.error("The attempt's number is not known: %s", path)
        return
    home = path.parent.parent
    ship_end(Shipper(directory, int(path.name), MasterLink.of_home(home)), end)


def _sendable(text: str | None) -> str | None:
    """Return the text without characters invalid in JSON, cut to a maximum length."""
    if text is None:
        return None
    return text.encode("utf-8", "replace").decode()[:_LONGEST_DETAIL]
