"""Samples with late decoding of images: per sample, or for a whole batch."""

import io
import json
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import xxhash

from paceline.data._default_batches import DataNotFoundError, collate_samples
from paceline.data._file_index_and_format import (
    DataFile,
    FileChunk,
    FileFormat,
    FileRows,
    FileSegments,
    IndexedFile,
)
from paceline.data._file_locations import DirectoryLocation, FileLocation
from paceline.data._sample_sources import Source

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")


def decode_image(content: bytes, name: str) -> Any:
    """Return an image as an array of uint8 of shape [height, width, 3].

    Raises:
        DataFormatError: It is no image that can be read.
    """
    with open_image(content, name) as image:
        return np.array(image)


@contextmanager
def open_image(content: bytes, name: str) -> Iterator[Any]:
    """Yield a decoded image in three colours.

    Raises:
        DataFormatError: It is no image that can be read.
    """
    from PIL import Image

    from paceline.data._default_batches import DataFormatError

    try:
        with Image.open(io.BytesIO(content)) as image:
            # Decodes, without the lock of the interpreter.
            image.load()
            yield image if image.mode == "RGB" else image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataFormatError(
            f"The image {name!r} ({len(content)} bytes) cannot be read: {error}."
        ) from error


def _decode_array(content: bytes, name: str) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False)


_DECODERS: dict[str, Callable[[bytes, str], Any]] = {
    **dict.fromkeys(IMAGES, decode_image),
    ".cls": lambda content, name: int(content),
    ".json": lambda content, name: json.loads(content),
    ".npy": _decode_array,
    ".txt": lambda content, name: content.decode(),
}


def decode(content: bytes, name: str) -> Any:
    """Return the decoded content of a file by suffix; the bytes for an unknown suffix."""
    at = name.rfind(".")
    decoder = _DECODERS.get(name[at:].lower())
    return content if decoder is None else decoder(content, name)


class Encoded(NamedTuple):
    """Encoded content of a file, with its name for messages and the choice of a decoder."""

    content: bytes
    name: str


class ImageBatchMemory:
    """Pool of arrays for image batches, reused when no reference to a batch is left.

    New memory costs a third as much time as the images that are decoded into it.

    Args:
        most: How many batches are kept.
    """

    def __init__(self, most: int) -> None:
        # Reference counts are exact only in CPython with its global lock: they show whether a batch
        # is still in use. Other interpreters get new memory for each batch.
        has_exact_counts = sys.implementation.name == "cpython" and _has_global_lock()
        self._most = most if has_exact_counts else 0
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        # A tensor, and whatever shares its memory, holds the array that it was made of.
        unused = [np.empty(0)]
        self._num_unused = sys.getrefcount(unused[0])

    def take(self, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised array of uint8."""
        with self._lock:
            kept = self._kept
            for number in range(len(kept)):
                if sys.getrefcount(kept[number]) == self._num_unused:
                    if kept[number].shape == shape:
                        return kept[number]
                    # Unused array of another shape: its slot is freed for the new shape.
                    del kept[number]
                    break
            array = np.empty(shape, np.uint8)
            if len(kept) < self._most:
                kept.append(array)
            return array


def _has_global_lock() -> bool:
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def decoded_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample with all contents decoded.

    Raises:
        DataFormatError: A content is damaged.
    """
    return {
        key: decode(*value) if isinstance(value, Encoded) else value
        for key, value in sample.items()
    }


def decoded_batch(samples: Sequence[Mapping[str, Any]], memory: ImageBatchMemory) -> Any:
    """Return a batch of encoded samples, decoded and collated as by `collate_samples`.

    Images of one size are decoded into the memory of the batch. Memory for each of them would
    cost half as much time as to decode it.

    Args:
        samples: The samples.
        memory: Gives the memory.

    Raises:
        DataFormatError: A content is damaged.
        ValueError: Images have different sizes.
    """
    keys = list(samples[0])
    if any(list(sample) != keys for sample in samples):
        return collate_samples([decoded_sample(sample) for sample in samples])
    batch = {}
    for key in keys:
        values = [sample[key] for sample in samples]
        is_encoded = all(isinstance(value, Encoded) for value in values)
        if is_encoded and all(value.name.lower().endswith(IMAGES) for value in values):
            batch[key] = _images(values, memory)
        if batch.get(key) is None:
            each = [decode(*value) if isinstance(value, Encoded) else value for value in values]
            batch[key] = collate_samples([{key: value} for value in each])[key]
    return batch


def _images(values: Sequence[Encoded], memory: ImageBatchMemory) -> Any:
    """Return decoded images in a single tensor, or None if the sizes differ."""
    import torch

    batch: Any = None
    for number, value in enumerate(values):
        with open_image(*value) as image:
            if batch is None:
                batch = memory.take((len(values), image.height, image.width, 3))
            if (image.height, image.width) != batch.shape[1:3]:
                return None
            batch[number] = np.asarray(image)
    return torch.from_numpy(batch)


# Requests to a store wait for its answer, not for this machine.
_REQUESTS_AT_ONCE = 16


class ImageSource(Source):
    """Images below a place, each in the folder of its class.

    Args:
        place: The place.

    Raises:
        DataNotFoundError: There is no image in a folder.
    """

    def __init__(self, place: FileLocation) -> None:
        from PIL import Image

        # Processes of a loader that are forked need not load the decoders.
        Image.preinit()
        self.name = place.url
        self._place = place
        self._files = [
            each
            for each in place.find("*/**/*")
            if each.name.lower().endswith(IMAGES) and "/" in each.name
        ]
        if not self._files:
            raise DataNotFoundError(
                f"There must be images in folders of {place.url!r}, such as cats/1.jpg, but there"
                f" are none that end in {list(IMAGES)}."
            )
        self.classes = sorted({each.name.partition("/")[0] for each in self._files})
        self._numbers = {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self._files)

    def fetch(self, numbers: Sequence[int]) -> list[Any]:
        """Return images with the numbers of their classes."""
        return [decoded_sample(sample) for sample in self.fetch_encoded(numbers)]

    @property
    def is_encoded(self) -> bool:
        """Images have to be decoded."""
        return True

    def fetch_encoded(self, numbers: Sequence[int]) -> list[Any]:
        """Return images before they are decoded."""
        if isinstance(self._place, DirectoryLocation) or len(numbers) == 1:
            return [self._image(number) for number in numbers]
        with ThreadPoolExecutor(min(_REQUESTS_AT_ONCE, len(numbers))) as pool:
            return list(pool.map(self._image, numbers))

    def _image(self, number: int) -> dict[str, Any]:
        file = DataFile(self._place, self._files[number])
        content = file.read(0, file.size)
        label = self._numbers[file.found.name.partition("/")[0]]
        return {"image": Encoded(content, file.name), "label": label}

    def identity(self) -> Mapping[str, Any]:
        """Return a digest of the names and sizes."""
        hasher = xxhash.xxh3_128()
        for each in self._files:
            hasher.update(f"{each.name}\0{each.size}\0".encode())
        return {
            "name": self.name,
            "digest": hasher.hexdigest(),
            "samples": len(self),
            "files": len(self),
            "prints": {},
        }


_PIECE_BYTES = 8 * 1024 * 1024
_BLOCK = 512


class _Member(NamedTuple):
    key: str
    name: str
    start: int
    end: int


class WebDatasetFormat(FileFormat):
    """Tar files of samples; samples are dictionaries of decoded files by their suffixes."""

    kind = "webdataset"
    suffixes = (".tar",)
    # Few samples are in memory as images.
    is_encoded = True

    def index_file(self, file: DataFile) -> IndexedFile:
        """Read where each sample lies."""
        hasher, chunks = xxhash.xxh3_64(), []
        start = end = rows = 0
        key: str | None = None
        for member in _shard_members(file):
            hasher.update(repr(member).encode())
            if member.key != key:
                if member.start - start >= _PIECE_BYTES:
                    chunks.append(
                        FileChunk(rows, start, member.start - start, member.start - start)
                    )
                    start, rows = member.start, 0
                key, rows = member.key, rows + 1
            end = member.end
        if rows:
            chunks.append(FileChunk(rows, start, end - start, end - start))
        return IndexedFile(chunks, hasher.hexdigest(), "")

    def read_chunk(self, file: DataFile, number: int, chunk: FileChunk) -> Any:
        """Read some samples; they are decoded when they are taken."""
        content = file.read(chunk.start, chunk.size)
        samples: list[dict[str, Any]] = []
        try:
            # Zero blocks are the end mark of a tar archive, which a piece of a shard lacks.
            with tarfile.open(fileobj=io.BytesIO(content + bytes(2 * _BLOCK)), mode="r:") as tar:
                for info in tar:
                    if not info.isfile():
                        continue
                    key, suffix = _parted(info.name)
                    if not samples or samples[-1]["__key__"] != key:
                        samples.append({"__key__": key})
                    begin = info.offset_data
                    name = f"{file.name}/{key}.{suffix}"
                    samples[-1][suffix] = Encoded(content[begin : begin + info.size], name)
        except tarfile.TarError as error:
            raise file.damaged(error) from error
        if len(samples) != chunk.rows:
            raise file.damaged(f"{len(samples)} samples were read where {chunk.rows} were counted")
        return FileRows(samples, chunk.num_bytes)


def _shard_members(file: DataFile) -> Iterator[_Member]:
    path = file.local_path
    # Each header of a remote file would be a request of its own.
    raw: Any = (
        path.open("rb") if path is not None else FileSegments(file, {0: file.read(0, file.size)})
    )
    try:
        with raw, tarfile.open(fileobj=raw, mode="r:") as tar:
            for info in tar:
                if info.isfile():
                    end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                    if info.offset_data + info.size > file.size:
                        raise file.damaged(f"{info.name!r} ends beyond it")
                    yield _Member(_parted(info.name)[0], info.name, info.offset, end)
    except (tarfile.TarError, EOFError) as error:
        raise file.damaged(error) from error


def _parted(name: str) -> tuple[str, str]:
    """Return the key and the suffix of a file's name."""
    directory, slash, base = name.rpartition("/")
    key, _, suffix = base.partition(".")
    return f"{directory}{slash}{key}", suffix
