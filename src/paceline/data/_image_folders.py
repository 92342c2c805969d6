"""Folders of images: the folder of an image names its class."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

from paceline.data._decode_files import IMAGES
from paceline.data._encoded_images import Encoded, decoded_sample
from paceline.data._errors import DataNotFoundError
from paceline.data._file_format import DataFile
from paceline.data._file_locations import DirectoryLocation, FileLocation
from paceline.data._sample_source import Source

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
