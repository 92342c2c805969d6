"""The file that holds the secrets of experiments, and nothing else does."""

import json
from pathlib import Path
from typing import Any

import msgspec

from paceline._regular_files import read_regular
from paceline._sealed_json import check_seal

FILE_NAME = "secrets.json"
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, msgspec.DecodeError)


class SecretFileError(RuntimeError):
    """Raised when the file of secrets cannot be read."""


def read_secret_file(path: Path) -> dict[int, dict[str, str]]:
    """Return the secrets of each experiment; none if there is no file.

    Raises:
        SecretFileError: The file is damaged, or cannot be read.
    """
    try:
        stored: Any = json.loads(check_seal(read_regular(path)))
        return {int(number): dict(found) for number, found in stored["experiments"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, *_DAMAGE) as error:
        raise SecretFileError(
            f"The secrets in {str(path)!r} must be readable, but are not ({type(error).__name__})."
            " Hint: move the file away; experiments that need secrets have to be forked with them."
        ) from error
