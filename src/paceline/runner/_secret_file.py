"""The file that holds the secrets of experiments, and nothing else does."""

import json
from pathlib import Path
from typing import Any

FILE_NAME = "secrets.json"


class SecretFileError(RuntimeError):
    """Raised when the file of secrets cannot be read."""


def read_secret_file(path: Path) -> dict[int, dict[str, str]]:
    """Return the secrets of each experiment; none if there is no file.

    Raises:
        SecretFileError: The file is damaged, or cannot be read.
    """
    try:
        stored: Any = json.loads(path.read_text(encoding="utf-8"))
        return {int(number): dict(found) for number, found in stored["experiments"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SecretFileError(
            f"The secrets in {str(path)!r} must be readable, but are not ({type(error).__name__})."
            " Hint: move the file away; experiments that need secrets have to be forked with them."
        ) from error
