"""Contents of single files by their suffixes: images, labels, texts, arrays."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

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

    from paceline.data._errors import DataFormatError

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
    """Return what a file holds, by its suffix; its bytes if that is not known."""
    at = name.rfind(".")
    decoder = _DECODERS.get(name[at:].lower())
    return content if decoder is None else decoder(content, name)
