"""Files of a run on their way to a master: each is sent before the record that names it."""

from collections import Counter
from collections.abc import Callable
from typing import IO

from paceline._base.files import open_regular_below, opened_directory
from paceline._base.journal_records import (
    MediaFile,
    MediaReported,
    RecordLost,
    decode_record,
    encode_record,
)
from paceline._base.run_directory import RunDirectory, check_file_path

MEDIA_MARK = b'"type":"media"'
"""Part of each media record, so that others need not be decoded."""
MAX_SMALL_BYTES = 64 * 1024
"""Size up to which a file is sent without asking first whether it is there already."""
REFUSED_FILE_STATUSES = frozenset({400, 404, 405, 413, 422})
"""HTTP statuses of a master that will never take a file; an older one knows no files."""
# Failures of a file that is passed over then: the records behind it must arrive.
_MAX_FAILURES = 5


class LostFileError(Exception):
    """Raised when a file of a record can never reach the master; the text says why."""


class FileShipping:
    """Sends the files of media records.

    Args:
        run: The run directory; whoever writes there is a stranger to the master.
        send: Sends a file; raises `LostFileError` if another try would be in vain.
        passing: Errors of `send` after which another try may succeed. The master must have
            answered other requests before each try, so a few failures are the file's own.
    """

    def __init__(
        self,
        run: RunDirectory,
        send: Callable[[MediaFile, IO[bytes]], None],
        passing: tuple[type[Exception], ...],
    ) -> None:
        self._run = run
        self._send = send
        self._passing = passing
        self._failures = Counter[str]()

    def ship(self, payload: bytes) -> bytes:
        """Send the files of a record, and return what to send of the record itself.

        A record without its files is replaced by one that says so: the master counts it as lost.
        """
        if MEDIA_MARK not in payload:
            return payload
        record = decode_record(payload)
        if not isinstance(record, MediaReported):
            return payload
        for file in record.files:
            try:
                self._ship_file(file)
            except LostFileError as error:
                what = f"{record.kind} {record.name!r:.300} at step {record.steps_completed}"
                reason = f"{what}: its file {file.path!r:.1200} {error!s:.1000}"
                return encode_record(RecordLost(time=record.time, reason=reason))
        return payload

    def _ship_file(self, file: MediaFile) -> None:
        try:
            content = open_run_file(self._run, file)
        except (OSError, ValueError) as error:
            raise LostFileError(f"cannot be read ({error})") from error
        with content:
            try:
                self._send(file, content)
            except self._passing as error:
                self._failures[file.path] += 1
                if self._failures[file.path] < _MAX_FAILURES:
                    raise
                raise LostFileError(f"cannot be sent ({error})") from error


def open_run_file(run: RunDirectory, file: MediaFile) -> IO[bytes]:
    """Open a file of a run, without following links.

    Raises:
        OSError: It is missing, no regular file, or cannot be read.
        ValueError: Its path leads elsewhere, or it has another size than recorded.
    """
    with opened_directory(run.path) as directory:
        name = f"{run.files_path.name}/{check_file_path(file.path)}"
        content = open_regular_below(directory, name)
    size = content.seek(0, 2)
    content.seek(0)
    if size != file.size:
        content.close()
        raise ValueError(f"it must have {file.size} bytes, but has {size}")
    return content
