"""Errors in the code of a search method, whoever wrote it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline._errors import PicklableError
from paceline.search._hyperparameter_kinds import SpaceError


class SearchMethodError(PicklableError, RuntimeError):
    """Raised when the code of a search method fails, or returns what it must not."""


@contextmanager
def method_errors(
    name: str, part: str, *, expected: type[Exception] = SpaceError
) -> Iterator[None]:
    """Name the search method and the part of it that runs in whatever it raises.

    Args:
        name: The name of the method.
        part: The part of it that is about to run.
        expected: What that part may well raise; it passes as it is.

    Raises:
        SearchMethodError: If the code inside raises anything else.
    """
    try:
        yield
    except (expected, SearchMethodError):
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise SearchMethodError(
            f"The search method `{name}` failed in `{part}`: {what} "
            f"({Path(at.filename).name}, line {at.lineno}).\n"
            "Hint: mend the method; `paceline.testing.check_search_method` tries all its parts."
        ) from error
