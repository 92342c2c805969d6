"""Data sets of files, by path, glob or URL."""

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from paceline.data._dataset import Dataset
from paceline.data._errors import DataError, DataNotFoundError

# The format of each suffix, and the module and class that read it.
_KINDS = {
    "parquet": "_parquet:ParquetFormat",
    "arrow": "_arrow:ArrowFormat",
    "csv": "_csv:CsvFormat",
    "json-lines": "_json_lines:JsonLinesFormat",
    "webdataset": "_webdataset:WebDatasetFormat",
}
_COMPRESSED = (".gz", ".tgz", ".zst", ".bz2", ".xz", ".lz4", ".zip")
_SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json-lines",
    ".ndjson": "json-lines",
    ".json": "json-lines",
    ".tar": "webdataset",
}


def read(
    url: str | os.PathLike[str],
    *,
    format: str | None = None,  # as such functions call it
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    memory_bytes: int | None = None,
    disk_bytes: int = 0,
) -> Dataset:
    """Return the data set of files.

    An index of the files says how many samples each has. It is made once: whatever lies beside the
    files by `write_index` is taken, else what was kept in the cache directory for files of the same
    size and time.

    Args:
        url: A path, a directory, a glob such as "data/**/*.parquet", or the URL of one, such as
            "s3://bucket/data/*.parquet".
        format: "parquet", "arrow", "csv", "json-lines" or "webdataset"; by the suffix of the files
            by default.
        columns: The columns to read, where files have some; None for all.
        delimiter: The character between the values of a CSV file: a tab for ".tsv", and a comma
            for others, by default.
        memory_bytes: About how many bytes of decoded samples each process keeps; 48 MiB by
            default.
        disk_bytes: How many bytes of remote files all processes of a machine keep on its disk, in
            the directory that PACELINE_CACHE_DIR names (~/.cache/paceline by default).

    Raises:
        DataNotFoundError: There are no such files.
        DataFormatError: A file is damaged, or has other columns than the first.
        DataError: The files cannot be reached.
        ValueError: The format is not known, or has no such option.
    """
    from paceline.data._file_index import load_index

    source = _open_source(url, format, columns, delimiter, load_index)
    source.keep(memory_bytes, disk_bytes)
    return Dataset(source)


def read_images(url: str | os.PathLike[str]) -> Dataset:
    """Return the data set of images in folders, whose names are those of their classes.

    A sample has the keys "image", an array of uint8 of shape [height, width, 3], and "label", the
    number of the class among the sorted folders. `num_workers` of `to_torch` decodes in processes.

    Args:
        url: A directory or its URL, with images such as cats/1.jpg.

    Raises:
        DataNotFoundError: There are none.
        DataError: The files cannot be reached.
    """
    _check_installed("PIL", "pillow")
    from paceline.data._file_locations import location_of
    from paceline.data._image_folders import ImageSource

    place, pattern = location_of(url)
    if pattern:
        raise ValueError(f"`url` must be a directory of folders, but got {os.fspath(url)!r}.")
    return Dataset(ImageSource(place))


def write_index(
    url: str | os.PathLike[str],
    *,
    format: str | None = None,  # as in `read`
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
) -> Dataset:
    """Look into files, write the index beside them, and return their data set.

    From then on, `read` of the same URL takes the index without listing the files. A file that was
    changed since then is an error when it is read.

    Args:
        url: See `read`.
        format: See `read`.
        columns: See `read`.
        delimiter: See `read`.

    Raises:
        DataError: See `read`.
    """
    from paceline.data._file_index import write_index

    return Dataset(_open_source(url, format, columns, delimiter, write_index))


def _open_source(
    url: str | os.PathLike[str],
    kind: str | None,
    columns: Sequence[str] | None,
    delimiter: str | None,
    index_of: Callable[[Any, str, Any], Any],
) -> Any:
    _check_installed("pyarrow", "pyarrow")
    from paceline.data._file_locations import location_of
    from paceline.data._file_source import FileSource

    place, pattern = location_of(url)
    if not pattern:
        suffix = _suffix_of_dataset(place)
        kind, pattern = kind or _SUFFIXES[suffix.lower()], f"**/*{suffix}"
    suffix = PurePosixPath(pattern).suffix.lower()
    if suffix in _COMPRESSED:
        raise _compressed_dataset_error(pattern)
    kind = kind or _dataset_kind(pattern, suffix)
    if suffix == ".tsv" and kind == "csv" and delimiter is None:
        delimiter = "\t"
    file_format = _dataset_format(kind, columns, delimiter)
    return FileSource(place, pattern, file_format, index_of(place, pattern, file_format))


def _compressed_dataset_error(name: str) -> ValueError:
    return ValueError(
        "Files must not be compressed as a whole, as no part of them could be read alone, but got"
        f" {name!r}. Hint: decompress them, or write them as Parquet, which compresses its row"
        " groups."
    )


def _dataset_kind(pattern: str, suffix: str) -> str:
    if suffix not in _SUFFIXES:
        raise ValueError(
            f"`format` must be given for {pattern!r}, as files are known by the suffixes"
            f" {sorted(_SUFFIXES)}."
        )
    return _SUFFIXES[suffix]


def _dataset_format(kind: str, columns: Sequence[str] | None, delimiter: str | None) -> Any:
    if kind not in _KINDS:
        raise ValueError(f"`format` must be one of {sorted(_KINDS)}, but got {kind!r}.")
    module, _, name = _KINDS[kind].partition(":")
    made = getattr(importlib.import_module(f"paceline.data.{module}"), name)
    options: dict[str, Any] = {}
    if columns is not None:
        if isinstance(columns, str) or not columns:
            raise ValueError(f"`columns` must be a list of names, but got {columns!r}.")
        if kind in ("json-lines", "webdataset"):
            raise ValueError(f"`columns` has no meaning for {kind} files. Hint: `map`.")
        options["columns"] = columns
    if delimiter is not None:
        if kind != "csv":
            raise ValueError(f"`delimiter` is for CSV files only, but got {kind} files.")
        options["delimiter"] = delimiter
    return made(**options)


def _suffix_of_dataset(place: Any) -> str:
    """Return the suffix of the files of a directory."""
    suffixes = sorted({PurePosixPath(each.name).suffix for each in place.find("**/*")})
    known = [suffix for suffix in suffixes if suffix.lower() in _SUFFIXES]
    if not known and (compressed := [each for each in suffixes if each.lower() in _COMPRESSED]):
        raise _compressed_dataset_error(f"{place.url.rstrip('/')}/**/*{compressed[0]}")
    if not known:
        raise DataNotFoundError(
            f"There must be files to read in {place.url!r}, but it has none that end in"
            f" {sorted(_SUFFIXES)}. Hint: others are named by a glob, such as"
            f" '{place.url.rstrip('/')}/*', and `format`."
        )
    if len(known) > 1:
        raise DataError(
            f"A directory must have files of one suffix, but {place.url!r} has {known}. Hint:"
            f" {place.url.rstrip('/')}/**/*{known[0]}"
        )
    return known[0]


def _check_installed(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"Files are read by the package `{package}`, which is not installed. Hint: pip install"
            " 'paceline[data]'."
        )
