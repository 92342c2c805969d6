"""Encoding of media as files: images, sound, videos, figures, tables, histograms.

No library is imported for an object: arrays, tensors and tables are known by their methods.
"""

import io
import mimetypes
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline._base.files import NotRegularFileError, read_regular
from paceline._base.imports import required_library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


MAX_FILE_BYTES = 256 * 2**20
"""Largest file of a media report, in bytes."""
# Larger images are of use to nobody who looks at them in a browser.
_MAX_PIXELS = 2**26
_MAX_ROWS = 100_000
_CHANNELS = (1, 3, 4)
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,10}")
# Types that other systems name otherwise, or not at all.
_TYPES = {
    ".webp": "image/webp",
    ".avif": "image/avif",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
    ".mkv": "video/x-matroska",
    ".csv": "text/csv",
    ".md": "text/plain",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedFile:
    """Content of a media file, and what describes it."""

    data: bytes
    suffix: str
    media_type: str
    facts: dict[str, Any] = field(default_factory=dict)


def encode_path(path: str | os.PathLike[str]) -> EncodedFile:
    """Return a file as it is.

    Raises:
        OSError: It cannot be read.
        ValueError: It is too large, or no regular file.
    """
    place = Path(path)
    try:
        data = read_regular(place, max_bytes=MAX_FILE_BYTES)
    except NotRegularFileError as error:
        raise ValueError(
            f"A file to report must be a regular one of at most {MAX_FILE_BYTES:,} bytes, but"
            f" {os.fspath(place)!r} is not."
        ) from error
    suffix = place.suffix.lower() if _SUFFIX.fullmatch(place.suffix) else ".bin"
    guessed = _TYPES.get(suffix) or mimetypes.guess_type(f"x{suffix}")[0]
    media_type = guessed or "application/octet-stream"
    return EncodedFile(data=data, suffix=suffix, media_type=media_type, facts={"name": place.name})


def encode_images(images: Any) -> list[EncodedFile]:
    """Return one image, a sequence of them, or those of an array with four axes.

    Raises:
        TypeError: One is no image.
        ValueError: One has another shape, no pixels, too many, or values that are no colours.
    """
    if isinstance(images, (list, tuple)):
        return [file for image in images for file in encode_images(image)]
    if isinstance(images, (str, os.PathLike)):
        return [encode_path(images)]
    if hasattr(images, "getbands") and hasattr(images, "save"):
        return [_encode_pil(images)]
    array = as_array("An image", images)
    found = [_pixels(image, images) for image in (array if array.ndim == 4 else [array])]
    return [_as_png(_pillow(pixels), facts) for pixels, facts in found]


def encode_audio(audio: Any, sample_rate: int | None) -> EncodedFile:
    """Return an audio file, or samples as WAV: floats from -1 to 1 or integers of 16 bits.

    Raises:
        TypeError: It is neither.
        ValueError: The samples have another shape, or there is no `sample_rate`.
    """
    if isinstance(audio, (str, os.PathLike)):
        return encode_path(audio)
    import wave

    import numpy as np

    samples = as_array("Audio", audio)
    samples = samples[:, None] if samples.ndim == 1 else samples
    if samples.ndim != 2 or not samples.size or samples.shape[1] > 32:
        raise ValueError(
            "Audio must have the shape (samples,) or (samples, channels), but has"
            f" {tuple(samples.shape)}."
        )
    if not sample_rate or sample_rate < 1:
        raise ValueError(f"`sample_rate` must be samples per second, but got {sample_rate!r}.")
    if samples.dtype.kind == "f":
        samples = (np.nan_to_num(samples).clip(-1, 1) * 32767).round()
    elif samples.dtype != np.int16:
        raise TypeError(f"Audio must have floats or 16-bit integers, but has {samples.dtype}.")
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((samples.shape[1], 2, int(sample_rate), 0, "NONE", ""))
        file.writeframes(np.ascontiguousarray(samples, "<i2").tobytes())
    facts = {"sample_rate": int(sample_rate), "seconds": len(samples) / sample_rate}
    return EncodedFile(data=target.getvalue(), suffix=".wav", media_type="audio/wav", facts=facts)


def encode_video(video: Any, frames_per_second: float) -> EncodedFile:
    """Return a video file, or frames (frames, height, width, channels) as an animated PNG.

    Raises:
        TypeError: It is neither.
        ValueError: The frames have another shape.
    """
    if isinstance(video, (str, os.PathLike)):
        return encode_path(video)
    array = as_array("A video", video)
    if array.ndim != 4 or not len(array):
        raise ValueError(
            "A video must have the shape (frames, height, width, channels), or with the channels"
            f" second, but has {tuple(array.shape)}."
        )
    if not 0 < frames_per_second <= 1000:
        raise ValueError(
            f"`frames_per_second` must be above 0 and at most 1000, but got {frames_per_second!r}."
        )
    if array.size > 4 * _MAX_PIXELS:
        raise ValueError(
            f"A video must have at most {4 * _MAX_PIXELS:,} values, but has {array.size:,}. Hint:"
            " report fewer frames, or the path of a file."
        )
    first, *others = [_pillow(_pixels(frame, video)[0]) for frame in array]
    facts = {"width": first.width, "height": first.height, "frames": len(array)}
    facts["fps"] = frames_per_second
    options = {"save_all": True, "append_images": others, "duration": 1000 / frames_per_second}
    return _as_png(first, facts, "image/apng", **options)


def encode_figure(figure: Any) -> EncodedFile:
    """Return a Matplotlib figure as PNG, or a Plotly figure as its JSON.

    Raises:
        TypeError: It is neither.
    """
    if hasattr(figure, "to_plotly_json") and hasattr(figure, "to_json"):
        text: str = figure.to_json()
        return EncodedFile(
            data=text.encode(),
            suffix=".plotly.json",
            media_type="application/json",
            facts={"format": "plotly"},
        )
    # Axes, as many functions of plotting libraries return.
    figure = getattr(figure, "figure", figure)
    if not hasattr(figure, "savefig"):
        raise TypeError(
            f"A figure must be one of Matplotlib or Plotly, but got {type(figure).__name__}."
        )
    target = io.BytesIO()
    figure.savefig(target, format="png")
    data = target.getvalue()
    width, height = struct.unpack(">II", data[16:24])
    facts = {"width": width, "height": height}
    return EncodedFile(data=data, suffix=".png", media_type="image/png", facts=facts)


def encode_table(table: Any) -> EncodedFile:
    """Return a table as JSON with `columns` and `rows`.

    Raises:
        TypeError: It is neither a data frame nor a list of dictionaries nor a dictionary of lists.
        ValueError: Columns differ in length, or there are too many rows.
    """
    columns, rows = _columns_and_rows(table)
    if len(rows) > _MAX_ROWS:
        raise ValueError(
            f"A table must have at most {_MAX_ROWS:,} rows, but has {len(rows):,}. Hint: report"
            " those that people want to see, and the rest with `report_file`."
        )
    content = {"columns": columns, "rows": [[_cell(value) for value in row] for row in rows]}
    data = msgspec.json.encode(content)
    facts = {"columns": len(columns), "rows": len(rows)}
    return EncodedFile(data=data, suffix=".json", media_type="application/json", facts=facts)


def histogram_of(values: Any, counts: Any, num_bins: int) -> dict[str, Any]:
    """Return the edges of the bins and the counts of values, or those given.

    Values that are not finite are counted apart, as `num_left_out`.

    Raises:
        TypeError: They are no numbers.
        ValueError: There are none, or there is not one edge more than counts.
    """
    import numpy as np

    if not 1 <= num_bins <= 1000:
        raise ValueError(f"`num_bins` must be from 1 to 1000, but got {num_bins!r}.")
    if counts is not None:
        edges, found, num_left_out = as_array("`values`", values), as_array("`counts`", counts), 0
        if edges.shape != (len(found) + 1,) or found.ndim != 1 or len(found) > 1000:
            raise ValueError(
                "With `counts`, `values` must be the edges of the bins, one more than counts (1000"
                f" at most), but their shapes are {edges.shape} and {found.shape}."
            )
    elif getattr(values, "is_cuda", False):
        # Counted where the values are: only the counts travel.
        finite = values.detach().float().flatten()
        finite, size = finite[finite.isfinite()], finite.numel()
        num_left_out = size - finite.numel()
        lowest, highest = (finite.min().item(), finite.max().item()) if len(finite) else (0.0, 0.0)
        found = finite.histc(num_bins, lowest, highest).cpu().numpy()
        edges = np.linspace(lowest, highest, num_bins + 1)
    else:
        given = as_array("`values`", values).ravel().astype(np.float64)
        known = given[np.isfinite(given)]
        num_left_out = given.size - known.size
        found, edges = np.histogram(known, num_bins)
    if not num_left_out and not found.sum() and counts is None:
        raise ValueError("A histogram must have values, but got none.")
    value = {"bins": edges.astype(float).tolist(), "counts": found.tolist()}
    return value | ({"num_left_out": int(num_left_out)} if num_left_out else {})


def as_array(what: str, value: Any) -> "NDArray[Any]":
    """Return an array, a tensor or a list of numbers as a NumPy array.

    Raises:
        TypeError: It is none of them.
    """
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be an array of numbers, but {error}.") from error
    if array.dtype.kind not in "buif":
        raise TypeError(
            f"{what} must be an array of numbers, but got {type(value).__name__} ({array.dtype})."
        )
    return array


def _encode_pil(image: Any) -> EncodedFile:
    width, height = image.size
    _check_size(width, height)
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = image.convert("RGB")
    return _as_png(image, {"width": width, "height": height})


def _as_png(
    image: Any, facts: dict[str, Any], media_type: str = "image/png", **options: Any
) -> EncodedFile:
    target = io.BytesIO()
    # Level 3 takes a third of the time of level 6 for a few per cent more bytes.
    image.save(target, format="PNG", compress_level=3, **options)
    data = target.getvalue()
    return EncodedFile(data=data, suffix=".png", media_type=media_type, facts=facts)


def _pixels(array: "NDArray[Any]", given: Any) -> "tuple[NDArray[np.uint8], dict[str, Any]]":
    """Return pixels (height, width, channels) of 8 bits, and facts about them."""
    import numpy as np

    shape = tuple(array.shape)
    if array.ndim == 2:
        array = array[:, :, None]
    # A tensor has its channels first, as torchvision has; an array has them last.
    places = (0, -1) if hasattr(given, "detach") else (-1, 0)
    place = next((p for p in places if array.ndim == 3 and array.shape[p] in _CHANNELS), None)
    if place is None:
        raise ValueError(
            "An image must have the shape (height, width), (height, width, channels) or (channels,"
            f" height, width) with 1, 3 or 4 channels, but has {shape}."
        )
    array = np.moveaxis(array, place, -1)
    height, width, _ = array.shape
    _check_size(width, height)
    facts: dict[str, Any] = {"width": width, "height": height}
    if array.dtype.kind == "b":
        return array.astype(np.uint8) * np.uint8(255), facts
    if array.dtype.kind in "ui":
        if array.dtype != np.uint8 and (array.min() < 0 or array.max() > 255):
            raise ValueError(
                "An image of integers must have values from 0 to 255, but has some from"
                f" {array.min()} to {array.max()}."
            )
        return array.astype(np.uint8), facts
    inside = (array >= 0) & (array <= 1)
    if not inside.all():
        # Shown all the same: an image that is wrong is the one to look at.
        facts["num_out_of_range"] = int(inside.size - np.count_nonzero(inside))
        array = np.nan_to_num(array, nan=0.0).clip(0, 1)
    return (array * 255 + 0.5).astype(np.uint8), facts


def _check_size(width: int, height: int) -> None:
    if not 0 < width * height <= _MAX_PIXELS:
        raise ValueError(
            f"An image must have 1 to {_MAX_PIXELS:,} pixels, but is {width} x {height}."
        )


def _pillow(pixels: "NDArray[np.uint8]") -> Any:
    """Return pixels as an image of Pillow."""
    image = required_library("PIL.Image", "An image or video of arrays", "paceline[data]")
    return image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _columns_and_rows(table: Any) -> tuple[list[str], Sequence[Sequence[Any]]]:
    if hasattr(table, "column_names") and hasattr(table, "to_pylist"):
        names = [*table.column_names]
        return names, [[row[name] for name in names] for row in table.to_pylist()]
    if hasattr(table, "itertuples"):
        return [str(name) for name in table.columns], [*table.itertuples(index=False, name=None)]
    if hasattr(table, "iter_rows") and hasattr(table, "columns"):
        return [*table.columns], [*table.iter_rows()]
    if isinstance(table, Mapping):
        try:
            return [str(name) for name in table], [*zip(*table.values(), strict=True)]
        except ValueError as error:
            raise ValueError(
                f"The columns of a table must be equally long, but {error}."
            ) from error
    if isinstance(table, Sequence) and all(isinstance(row, Mapping) for row in table):
        # Each name once, in the order in which the rows have them.
        found = [*dict.fromkeys(name for row in table for name in row)]
        return [str(name) for name in found], [[row.get(name) for name in found] for row in table]
    raise TypeError(
        "A table must be a data frame (pandas, Polars, Arrow), a list of dictionaries or a"
        f" dictionary of columns, but got {type(table).__name__}."
    )


def _cell(value: Any) -> Any:
    """Return a value that JSON has; NaN becomes null, as in CSV."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, (list, tuple)):
        return [_cell(one) for one in value]
    return str(value).encode(errors="replace").decode()
