"""The data set type accepted by every front door, streams with steps, and reading of files."""

import importlib
import importlib.util
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeAlias

from paceline._base.arguments_and_errors import check_function
from paceline._base.imports import html_table
from paceline.data._data_errors import DataError, DataNotFoundError
from paceline.data._order_and_read_plan import Plan, Reader
from paceline.data._sample_sources import (
    FilteredSamples,
    MapBatchesStage,
    MapSamplesStage,
    SamplesInMemory,
    Source,
    Stage,
    StagedSource,
    is_iterable_only,
    range_of,
    split_into_folds,
    split_into_parts,
    split_sizes,
    worker_part,
)
from paceline.data._stream_pieces import StreamPieces, stream_pieces

logger = logging.getLogger(__name__)


_FETCHED_TOGETHER = 256

StreamStep: TypeAlias = Callable[[Iterator[Any]], Iterator[Any]]
"""Processing step for the samples of a stream."""


class Stream:
    """Iterable of samples with processing steps.

    Args:
        data: An iterable; an iterable torch data set keeps its place in a checkpoint if it has
            `state_dict`.
        steps: The steps, in order.
    """

    def __init__(self, data: Iterable[Any], steps: tuple[StreamStep, ...] = ()) -> None:
        self.data = data
        self.steps = steps
        self.name = f"the {type(data).__name__}"
        self._has_begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun and isinstance(self.data, Iterator):
            logger.warning(
                "The samples of %s are there once, and this is another epoch of it: what was read"
                " before is not read again. Hint: an object whose `__iter__` begins anew.",
                self.name,
            )
        self._has_begun = True
        return _run_steps(self.data, self.steps)

    def then(self, step: StreamStep) -> "Stream":
        """Return the stream with an added step."""
        return Stream(self.data, (*self.steps, step))

    def pieces(self) -> StreamPieces | None:
        """Return the stream in pieces, or None if only readable as a whole."""
        pieces = stream_pieces(self.data)
        return pieces and _SteppedPieces(pieces, self.steps)

    @property
    def holds_samples(self) -> bool:
        """Whether a step buffers samples already read but not yet yielded."""
        return any(isinstance(step, (BatchStreamStep, MixingStreamStep)) for step in self.steps)


def _run_steps(data: Iterable[Any], steps: tuple[StreamStep, ...]) -> Iterator[Any]:
    samples = iter(data)
    for step in steps:
        samples = step(samples)
    return samples


class _SteppedPieces(StreamPieces):
    """Pieces of a stream with steps applied to the samples of each piece."""

    def __init__(self, pieces: StreamPieces, steps: tuple[StreamStep, ...]) -> None:
        self.num_pieces, self.name = pieces.num_pieces, pieces.name
        self.is_shuffled = pieces.is_shuffled or any(type(s) is MixingStreamStep for s in steps)
        self._pieces = pieces
        self._steps = steps

    def read(self, piece: int, epoch: int) -> Iterable[Any]:
        return _run_steps(self._pieces.read(piece, epoch), self._steps)


class BatchStreamStep:
    """A function of some samples at once.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the function's results for groups of samples."""
        while batch := list(islice(samples, _FETCHED_TOGETHER)):
            yield from self._function(batch)


class MixingStreamStep:
    """Shuffle buffer: yields samples drawn at random.

    Args:
        size: The samples in the buffer.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the samples in another order, by the process's own generator."""
        buffer = list(islice(samples, self._size))
        for sample in samples:
            place = random.randrange(len(buffer))  # noqa: S311
            buffer[place], sample = sample, buffer[place]
            yield sample
        random.shuffle(buffer)
        yield from buffer


def _every(samples: Iterator[Any], rank: int, num_parts: int) -> Iterator[Any]:
    """Return every so many samples, from one of them on."""
    return islice(samples, rank, None, num_parts)


class Fold(NamedTuple):
    """Pair of training and validation data sets of a cross validation.

    Attributes:
        train: The samples of the other folds.
        validation: The samples of this fold.
    """

    train: "Dataset"
    validation: "Dataset"


_READ_AT_ONCE = 1024
_STREAM_BUFFER = 10_000


class Dataset:
    """Data set with lazy reads; each worker of a run reads only its own part.

    All methods leave it as it is and return a new one. A data set of samples with numbers has a
    length, can be split, and resumes anywhere at once; a stream has neither length nor numbers.

    Args:
        data: A map-style or iterable torch data set, a sequence, an array, a tensor, any other
            iterable, or a path or URL for `read`.
    """

    def __init__(self, data: Any) -> None:
        self._stages: tuple[Stage, ...] = ()
        self._plan = Plan()
        self._source: Source | Stream
        if isinstance(data, (Source, Stream)):
            self._source = data
        elif isinstance(data, (str, os.PathLike)):
            self._source = read(data)._source
        elif isinstance(data, Dataset):
            self._stages, self._plan, self._source = data._stages, data._plan, data._source
        else:
            self._source = Stream(data) if is_iterable_only(data) else SamplesInMemory(data)

    def __getstate__(self) -> dict[str, Any]:
        # The worker that reads is not the same elsewhere.
        return {**vars(self), "_plan": replace(self._plan, reader=None)}

    def __repr__(self) -> str:
        size = "" if isinstance(self._source, (Stream, FilteredSamples)) else f", {len(self)}"
        return f"<Dataset of {self._source.name}{size}>"

    def _repr_html_(self) -> str:
        is_unread = isinstance(self._source, (Stream, FilteredSamples))
        size = "not known before they are read" if is_unread else f"{len(self):,}"
        return html_table("Dataset", (), [("source", self._source.name), ("samples", size)])

    # ---- samples -------------------------------------------------------------------------

    @property
    def is_stream(self) -> bool:
        """Whether the data set is a stream, without a length."""
        return isinstance(self._source, Stream)

    def __len__(self) -> int:
        """Return the number of samples.

        Raises:
            TypeError: It is a stream.
        """
        source, part = self._numbered("has a length"), self._plan.part
        return len(source) if part is None else len(worker_part(source, *part))

    def __getitem__(self, number: Any) -> Any:
        """Return a sample by its number; negative numbers count from the end."""
        if not hasattr(number, "__index__"):
            raise TypeError(
                f"A sample must be named by an integer, but got {number!r}. Hint: `split` with"
                " `seed=None` gives samples that follow each other."
            )
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return samples by their numbers, as torch's loaders ask for them."""
        source, total = self._numbered("has samples by number"), len(self)
        for number in numbers:
            if not -total <= number < total:
                raise IndexError(f"A sample must be from 0 to {total - 1}, but got {number}.")
        places = [number % total for number in numbers]
        if self._plan.part is not None:
            part = worker_part(source, *self._plan.part)
            places = [part[place] for place in places]
        return list(self.fetch(places))

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples in their own order, whether or not they are shuffled."""
        if isinstance(self._source, Stream):
            yield from self._source if self._plan.part is None else self._alone()
            return
        total = len(self)
        for start in range(0, total, _READ_AT_ONCE):
            yield from self.__getitems__(range(start, min(start + _READ_AT_ONCE, total)))

    def fetch(self, numbers: Sequence[int]) -> Any:
        """Return samples of the whole data set as they were read: a list, or `Columns`."""
        return self.apply_stages(self._numbered("has numbers").fetch(numbers), numbers)

    def apply_stages(self, samples: Any, numbers: Sequence[int] | None = None) -> Any:
        """Return samples of the source after all stages; `numbers` name them in errors."""
        for stage in self._stages:
            samples = stage.apply(samples, numbers)
        return samples

    # ---- operations ----------------------------------------------------------------------

    def map(self, function: Callable[[Any], Any]) -> "Dataset":
        """Return a data set with a function applied to each sample.

        Args:
            function: It is called in the worker whenever a sample is read.
        """
        check_function("function", function)
        if isinstance(self._source, Stream):
            return self._with(source=self._source.then(partial(map, function)))
        return self._with(stages=(*self._stages, MapSamplesStage(function)))

    def map_batches(self, function: Callable[[Any], Any]) -> "Dataset":
        """Return a data set with a function applied to samples as they are fetched together.

        Which samples these are depends on the batch size and the number of workers: the function
        must treat each by itself.

        Args:
            function: It gets a list of samples and returns one of as many. Where files have
                columns and there was no `map` before, it gets and returns a dictionary of arrays.
        """
        check_function("function", function)
        if isinstance(self._source, Stream):
            return self._with(source=self._source.then(BatchStreamStep(function)))
        return self._with(stages=(*self._stages, MapBatchesStage(function)))

    def filter(self, keeps: Callable[[Any], Any]) -> "Dataset":
        """Return a data set of only the samples accepted by a function.

        Samples with numbers are counted once, which reads all of them: when the length is first
        needed, or before the data set is sent to workers.

        Args:
            keeps: The function of a sample.
        """
        check_function("keeps", keeps)
        if isinstance(self._source, Stream):
            return self._with(source=self._source.then(partial(filter, keeps)))
        return self._with(source=FilteredSamples(self._staged(), keeps), stages=())

    def shuffle(self, window: int | None = None) -> "Dataset":
        """Return the data set with a random order of its own in each epoch.

        The order depends on the seed of the run and the epoch alone.

        Args:
            window: How many samples of files or of a stream are mixed with each other; samples in
                memory are mixed all at once.

        Raises:
            ValueError: It is not at least 1.
        """
        plan = self._plan.shuffled(window)
        if isinstance(self._source, Stream):
            return self._with(source=self._source.then(MixingStreamStep(window or _STREAM_BUFFER)))
        return self._with(plan=plan)

    def pipeline(
        self, length: int | None = None, *, pipeline_args: Mapping[str, Any] | None = None
    ) -> "Dataset":
        """Return the data set with other settings of how files are read.

        Args:
            length: How many windows are read ahead of the one in use.
            pipeline_args: `length` and `window` (see `shuffle`) by name, such as from a config.

        Raises:
            ValueError: There is no such setting.
        """
        options = {"length": length, **(pipeline_args or {})}
        return self._with(plan=self._plan.with_pipeline(options))

    # ---- parts ---------------------------------------------------------------------------

    def split(self, sizes: int | Sequence[float], *, seed: int | None = 0) -> list["Dataset"]:
        """Return disjoint parts.

        Args:
            sizes: The number of parts of equal size; or the number of samples of each; or the share
                of each, such as (0.8, 0.2).
            seed: Mixes the samples before they are cut. Samples of files are mixed by row groups,
                so that each part reads few of them. None cuts them in their own order.

        Raises:
            TypeError: It is a stream.
            ValueError: A part would have no samples.
        """
        source = self._numbered("can be split")
        counts = split_sizes(len(source), sizes)
        return [self._with(source=part) for part in split_into_parts(source, counts, seed)]

    def to_cv(self, splits: int = 5, *, seed: int | None = 0) -> list[Fold]:
        """Return the folds of a cross validation; each sample is in exactly 1 validation part.

        Args:
            splits: The number of folds.
            seed: See `split`.

        Raises:
            TypeError: It is a stream.
            ValueError: A fold would have no samples.
        """
        source = self._numbered("can be split")
        return [
            Fold(self._with(source=rest), self._with(source=own))
            for rest, own in split_into_folds(source, splits, seed)
        ]

    def get_shard(self, rank: int | None = None, num_shards: int | None = None) -> "Dataset":
        """Return a worker's part.

        Args:
            rank: Which worker's; in a run, this one's by default.
            num_shards: The number of parts; in a run, the number of workers by default.

        Raises:
            ValueError: There is no such part.
        """
        return self._with(plan=self._plan.of_worker(rank, num_shards))

    def get_split(self) -> "Dataset":
        """Return this worker's part."""
        return self.get_shard()

    def read_by(self, reader: Reader) -> "Dataset":
        """Return the data set bound to the worker of a run, its reader."""
        return self._with(plan=replace(self._plan, reader=reader))

    def to_torch(
        self,
        batch_size: int = 1,
        *,
        shuffle: bool | None = None,
        num_workers: int = 0,
        collate: Callable[[Any], Any] | None = None,
        move_to_device: bool = True,
        **options: Any,
    ) -> Any:
        """Return a loader of the samples in batches; in a run, of this worker's part.

        Which samples a batch has depends on the seed of the run, the epoch and the number of
        shards alone; a checkpoint within an epoch holds the place.

        Args:
            batch_size: The samples of one worker's batch.
            shuffle: Whether each epoch has a random order of its own; as `shuffle()` says by
                default. A stream is shuffled by `shuffle()` alone.
            num_workers: The processes that read for this worker; 0 reads in the worker itself.
            collate: Makes a batch of a list of samples; torch's by default.
            move_to_device: Whether, in a run, batches are moved to this worker's device.
            options: Further options of a torch `DataLoader`.

        Raises:
            ValueError: This is the part of another worker, or there are too few samples.
        """
        from paceline.data._torch_loaders import make_loader

        plan = self._plan
        plan.check_own_part()
        if shuffle is not None:
            plan = replace(plan, is_shuffled=shuffle)
        if plan.reader is not None:
            # The order of a run parts the whole.
            plan = replace(plan, part=None)
        dataset = self._with(plan=plan)
        if plan.reader is None:
            dataset = dataset._alone()
        collate = options.pop("collate_fn", None) if collate is None else collate
        loader = make_loader(dataset, batch_size, num_workers, collate, options)
        if plan.reader is None:
            return loader
        return plan.reader.prepare(loader, is_moved=move_to_device)

    # ---- used by torch and the engine -----------------------------------------------

    def epoch_order(
        self,
        *,
        seed: int,
        epoch: int,
        num_shards: int,
        shard_size: int,
        drop_last: bool,
        is_shuffled: bool,
    ) -> Sequence[Sequence[int]] | None:
        """Return the samples of an epoch in shards; None if any order costs the same.

        Args:
            seed: The seed of the run.
            epoch: The epoch.
            num_shards: The shards of a global batch.
            shard_size: The samples of a shard.
            drop_last: Whether shards with fewer samples are left out.
            is_shuffled: Whether the order is random.
        """
        return self._plan.epoch_shards(
            self._numbered("has an order"),
            num_shards,
            shard_size,
            seed=seed,
            epoch=epoch,
            drop_last=drop_last,
            is_shuffled=is_shuffled,
        )

    def identity(self) -> Mapping[str, Any] | None:
        """Return facts to recognise these samples by in a checkpoint, or None."""
        if isinstance(self._source, Stream):
            return None
        identity = self._source.identity()
        window = self._plan.window or self._source.window()
        return identity and {**identity, "window": window}

    # ---- used by other modules of the package ---------------------------------------

    @property
    def source(self) -> Source | Stream:
        """The source of the samples."""
        return self._source

    @property
    def plan(self) -> Plan:
        """The plan of reading: order, windows and the worker's part."""
        return self._plan

    @property
    def has_stages(self) -> bool:
        """Whether something is done to the samples once they are read."""
        return bool(self._stages)

    def _alone(self) -> "Dataset":
        """Return this worker's part as an independent data set."""
        part, source = self._plan.part, self._source
        if part is None:
            return self
        plan = replace(self._plan, part=None)
        if isinstance(source, Stream):
            return self._with(
                source=source.then(partial(_every, rank=part[0], num_parts=part[1])), plan=plan
            )
        return self._with(source=range_of(source, worker_part(source, *part)), plan=plan)

    def _numbered(self, what: str) -> Source:
        if isinstance(self._source, Stream):
            raise TypeError(
                f"Only a data set whose samples have numbers {what}, but {self._source.name} is"
                " read from its beginning to its end."
            )
        return self._source

    def _staged(self) -> Source:
        """Return a source of the samples as they are now."""
        source = self._numbered("has numbers")
        return StagedSource(source, self._stages) if self._stages else source

    def _with(
        self,
        *,
        source: Source | Stream | None = None,
        stages: tuple[Stage, ...] | None = None,
        plan: Plan | None = None,
    ) -> "Dataset":
        changed = Dataset(self)
        # A source that has not counted its samples must not be asked whether it has any.
        changed._source = self._source if source is None else source
        changed._stages = self._stages if stages is None else stages
        changed._plan = plan or self._plan
        return changed


# The format of each suffix, and the module and class that read it.
_KINDS = {
    "parquet": "_table_formats:ParquetFormat",
    "arrow": "_table_formats:ArrowFormat",
    "csv": "_table_formats:CsvFormat",
    "json-lines": "_table_formats:JsonLinesFormat",
    "webdataset": "_file_index_and_format:WebDatasetFormat",
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

    An index of the files says how many samples each has. It is made once: an index that
    `write_index` has put beside the files is taken, else the one in the cache directory for files
    of the same size and time.

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
    from paceline.data._file_index_and_format import load_index

    source = _open_source(url, format, columns, delimiter, load_index)
    source.keep(memory_bytes, disk_bytes)
    return Dataset(source)


def read_images(url: str | os.PathLike[str]) -> Dataset:
    """Return the data set of images in folders; each folder's name is the class name.

    A sample has the keys "image", an array of uint8 of shape [height, width, 3], and "label", the
    number of the class among the sorted folders. `num_workers` of `to_torch` decodes in processes.

    Args:
        url: A directory or its URL, with images such as cats/1.jpg.

    Raises:
        DataNotFoundError: There are none.
        DataError: The files cannot be reached.
    """
    _check_installed("PIL", "pillow")
    from paceline.data._file_index_and_format import ImageSource
    from paceline.data._file_locations import location_of

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
    from paceline.data._file_index_and_format import write_index

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
        suffix = _dataset_suffix(place)
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


def _dataset_suffix(place: Any) -> str:
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
