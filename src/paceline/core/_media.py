"""Media reports: files of a run below its directory, and the records that name them."""

import errno
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline import faults
from paceline._base.files import write_atomically
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.journal_records import MediaFile, MediaReported, RecordLost
from paceline._base.run_directory import RunDirectory, check_file_path
from paceline._base.run_tail_and_files import MEDIA_MARK
from paceline.core._arguments import checked_steps, rank_group
from paceline.core._media_encoding import (
    MAX_FILE_BYTES,
    EncodedFile,
    encode_audio,
    encode_figure,
    encode_images,
    encode_path,
    encode_table,
    encode_video,
    histogram_of,
)
from paceline.core._read_runs import standing_journals

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

# Of all media of the chief; other ranks have their own, as with metrics.
_GROUP = "training"
_MAX_NAME = 200
_MAX_CAPTION = 500
# Files of one report: their list must fit into a record.
_MAX_FILES = 100
# Files of one process: a run must not fill a disk with images of each step.
_MAX_REPORTED = 100_000
# A longer text becomes a file.
_MAX_TEXT_BYTES = 16 * 1024
Captions = str | Sequence[str] | None


faults.register("core.media_written")


class MediaRow(NamedTuple):
    """Media report of a run: what a journal has, and whether a later attempt went back before it.

    `attempt` counts from 0, as in `MetricsRow`.
    """

    attempt: int
    rank: int
    report: MediaReported
    is_superseded: bool


class MediaReports:
    """Report images, sound, tables and other media; any rank may, from any thread.

    Each call encodes in the thread that makes it, writes a file into the run directory, and appends
    one record. A disk that takes no file costs the report alone: the first one is logged, and all
    of them are counted as lost.

    All methods take the number of completed batches and a name, which may have slashes, such as
    "validation/samples"; most take `captions`, a text or one for each file.
    """

    def __init__(self, *, run: RunDirectory, journal: JournalWriter, rank: int) -> None:
        self._run = run
        self._journal = journal
        self._rank = rank
        self._num_media_files = 0
        self._has_warned_of_media = False

    def report_image(
        self, steps_completed: int, name: str, images: Any, *, captions: Captions = None
    ) -> None:
        """Report an image, or up to 100 of them.

        Args:
            steps_completed: The number of batches that training has completed.
            name: What the images are of.
            images: A Pillow image, an array, a tensor or the path of a file, or a list of these.
                Arrays are (height, width) or (height, width, channels), tensors (channels, height,
                width), with one more axis in front for several; floats go from 0 to 1. Values
                beyond are shown as the nearest colour, NaN as 0, and their number is recorded.
            captions: A text below them, or one for each.

        Raises:
            TypeError: One is no image.
            ValueError: An image has another shape, no pixels, or more than 67 million.
        """
        self._report_media("image", steps_completed, name, encode_images(images), captions)

    def report_audio(
        self,
        steps_completed: int,
        name: str,
        audio: Any,
        *,
        sample_rate: int | None = None,
        captions: Captions = None,
    ) -> None:
        """Report sound: the path of a file, or samples.

        Args:
            steps_completed: The number of batches that training has completed.
            name: What it is of.
            audio: A path, or samples (samples,) or (samples, channels): floats from -1 to 1, or
                integers of 16 bits.
            sample_rate: Samples per second; needed for samples.
            captions: A text below it.

        Raises:
            TypeError: `audio` is neither.
            ValueError: The samples have another shape, or there is no `sample_rate`.
        """
        file = encode_audio(audio, sample_rate)
        self._report_media("audio", steps_completed, name, [file], captions)

    def report_video(
        self,
        steps_completed: int,
        name: str,
        video: Any,
        *,
        frames_per_second: float = 8.0,
        captions: Captions = None,
    ) -> None:
        """Report a video: the path of a file, or frames, which become an animated PNG.

        Args:
            steps_completed: The number of batches that training has completed.
            name: What it is of.
            video: A path, or (frames, height, width, channels); see `report_image` for values.
            frames_per_second: Of frames.
            captions: A text below it.

        Raises:
            TypeError: `video` is neither.
            ValueError: The frames have another shape, or are too many.
        """
        file = encode_video(video, frames_per_second)
        self._report_media("video", steps_completed, name, [file], captions)

    def report_table(self, steps_completed: int, name: str, table: Any) -> None:
        """Report a table of at most 100,000 rows.

        Args:
            steps_completed: The number of batches that training has completed.
            name: What it is of.
            table: A data frame of pandas, Polars or Arrow, a list of dictionaries, or a dictionary
                of columns.

        Raises:
            TypeError: `table` is none of these.
            ValueError: It has too many rows, or columns that are not equally long.
        """
        self._report_media("table", steps_completed, name, [encode_table(table)])

    def report_histogram(
        self,
        steps_completed: int,
        name: str,
        values: Any,
        *,
        num_bins: int = 64,
        counts: Any = None,
    ) -> None:
        """Report how values are distributed, such as weights or gradients.

        Args:
            steps_completed: The number of batches that training has completed.
            name: What they are of.
            values: An array or tensor; those of a GPU are counted there. With `counts`: the edges
                of the bins.
            num_bins: How many bins of equal width, 1000 at most.
            counts: Counts that are known already, one less than edges.

        Raises:
            TypeError: They are no numbers.
            ValueError: There are none, or edges and counts do not fit together.
        """
        value = histogram_of(values, counts, num_bins)
        self._report_media("histogram", steps_completed, name, [], value=value)

    def report_text(self, steps_completed: int, name: str, text: str) -> None:
        """Report a text, such as a generated answer; one of more than 16 KiB becomes a file.

        Raises:
            TypeError: `text` is no string.
        """
        data = _text_bytes("text", text)
        if len(data) <= _MAX_TEXT_BYTES:
            self._report_media("text", steps_completed, name, [], value=data.decode())
        else:
            file = EncodedFile(data=data, suffix=".txt", media_type="text/plain")
            self._report_media("text", steps_completed, name, [file])

    def report_figure(
        self, steps_completed: int, name: str, figure: Any, *, captions: Captions = None
    ) -> None:
        """Report a figure of Matplotlib (as PNG) or Plotly (as JSON); it stays open.

        Raises:
            TypeError: `figure` is neither.
        """
        file = encode_figure(figure)
        self._report_media("figure", steps_completed, name, [file], captions)

    def report_html(self, steps_completed: int, name: str, html: str | Path) -> None:
        """Report a page: HTML as a string, or the path of a file as a `Path`.

        A master shows it where its scripts reach nothing of the master.

        Raises:
            TypeError: `html` is neither.
        """
        data = encode_path(html).data if isinstance(html, Path) else _text_bytes("html", html)
        file = EncodedFile(data=data, suffix=".html", media_type="text/html")
        self._report_media("html", steps_completed, name, [file])

    def report_file(
        self,
        steps_completed: int,
        name: str,
        path: str | os.PathLike[str],
        *,
        captions: Captions = None,
    ) -> None:
        """Report a file as it is, of at most 256 MiB.

        Raises:
            OSError: It cannot be read.
            ValueError: It is too large, or no regular file.
        """
        self._report_media("file", steps_completed, name, [encode_path(path)], captions)

    def _report_media(
        self,
        kind: str,
        steps_completed: int,
        name: str,
        files: Sequence[EncodedFile],
        captions: Captions = None,
        value: Any = None,
    ) -> None:
        steps_completed = checked_steps(steps_completed)
        _check_name(name)
        if len(files) > _MAX_FILES or (not files and value is None):
            raise ValueError(f"A report must have 1 to {_MAX_FILES} files, but has {len(files)}.")
        texts = _captions(captions, len(files))
        named = [
            _named(file, f"media/{name}/{steps_completed}-{index}", caption)
            for index, (file, caption) in enumerate(zip(files, texts, strict=True))
        ]
        self._num_media_files += len(files)
        try:
            if self._num_media_files > _MAX_REPORTED:
                raise OSError(errno.EDQUOT, f"The process has reported {_MAX_REPORTED:,} files")
            for file, target in zip(files, named, strict=True):
                self._write_file(self._run.files_path / target.path, file.data)
        except OSError as error:
            self._lose_media(f"{kind} {name!r} at step {steps_completed}", error)
            return
        faults.reach("core.media_written")
        self._journal.append(
            MediaReported(
                time=time.time(),
                group=rank_group(_GROUP, self._rank),
                steps_completed=steps_completed,
                name=name,
                kind=kind,
                files=named,
                value=value,
            )
        )

    @staticmethod
    def _write_file(path: Path, data: bytes) -> None:
        try:
            write_atomically(path, data)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, data)

    def _lose_media(self, what: str, error: OSError) -> None:
        """Count a report as lost, as its file cannot be written."""
        why = error.strerror or type(error).__name__
        self._journal.append(RecordLost(time=time.time(), reason=f"{what}: {why}"))
        if not self._has_warned_of_media:
            self._has_warned_of_media = True
            logger.warning(
                "The %s is lost (%s). Training goes on; further lost media are counted only. Hint:"
                " make room on the disk of %s.",
                what,
                why,
                self._run.path,
            )


def read_media(run: RunDirectory, name: str | None = None) -> Iterator[MediaRow]:
    """Yield the media reports of all ranks of a run, of a single name or of all.

    Args:
        run: The run directory; it may still be written to.
        name: The name under which they were reported.
    """
    for rank in sorted({key.rank for key in run.journal_keys()}):
        for key, last_step in standing_journals(run, rank):
            for entry in run.reader(key):
                # Decoded only where it can be one: most records are metrics.
                if MEDIA_MARK not in entry.payload:
                    continue
                record = entry.decode()
                if isinstance(record, MediaReported) and name in (None, record.name):
                    is_superseded = record.steps_completed > last_step
                    yield MediaRow(key.attempt, rank, record, is_superseded)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"`name` must be a string, but got {name!r}.")
    if len(name.encode(errors="replace")) > _MAX_NAME:
        raise ValueError(f"`name` must have at most {_MAX_NAME} bytes, but got {name!r:.300}.")
    check_file_path(name)


def _captions(captions: Captions, num_files: int) -> Sequence[str | None]:
    if captions is None:
        return [None] * num_files
    texts = [captions] * num_files if isinstance(captions, str) else [*captions]
    if len(texts) != num_files:
        raise ValueError(
            f"`captions` must be one text, or one for each of {num_files} files, but has"
            f" {len(texts)}."
        )
    for text in texts:
        if not isinstance(text, str) or len(text) > _MAX_CAPTION:
            raise ValueError(
                f"A caption must be a text of at most {_MAX_CAPTION} characters, but got"
                f" {text!r:.600}."
            )
    return [text.encode(errors="replace").decode() for text in texts]


def _named(file: EncodedFile, place: str, caption: str | None) -> MediaFile:
    if len(file.data) > MAX_FILE_BYTES:
        raise ValueError(
            f"A file of a report must have at most {MAX_FILE_BYTES:,} bytes, but has"
            f" {len(file.data):,}."
        )
    digest = hashlib.sha256(file.data).hexdigest()
    return MediaFile(
        path=f"{place}-{digest[:12]}{file.suffix}",
        digest=digest,
        size=len(file.data),
        media_type=file.media_type,
        caption=caption,
        facts=file.facts,
    )


def _text_bytes(name: str, text: object) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"`{name}` must be a string, but got {text!r:.300}.")
    return text.encode(errors="replace")
