"""Requests to a bucket: repeated with growing pauses, and their errors in plain words."""

import html
import logging
import random
import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from obstore.exceptions import BaseError

from paceline.storage._uploads import Upload

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# Metadata address of cloud machines: the source of their credentials in all clouds.
MACHINE_CREDENTIALS = "//169.254.169.254/"
# Errors of the client without an answer, or from a server unable to answer at this moment.
_AWAY = re.compile(r"HTTP error|status code: (?:408|429|500|502|503|504|507|509)\b")

# Users seed the generator of the module `random`, and forked processes share its state.
_random = random.SystemRandom()

_FIRST_PAUSE_S = 0.1
# The longest pause, and how long a store is away before that is reported, as shares of one try.
_LONGEST_PAUSE = 1 / 4
_REPORTED_AFTER = 1 / 12


def may_pass(error: Exception) -> bool:
    """Return whether an error of the client means a store not answering at this moment."""
    if not isinstance(error, BaseError):
        return False
    text = str(error)
    return _AWAY.search(text) is not None and MACHINE_CREDENTIALS not in text


class PatientCalls:
    """Repeats calls to a store after passing errors; usable from any thread.

    Attributes:
        on_trouble: Called, in any thread, with the reason once the store has not answered for a
            while, and with None once it answers again.
    """

    def __init__(self, url: str) -> None:
        self.on_trouble: Callable[[str | None], None] | None = None
        self._url = url
        self._lock = threading.Lock()
        self._is_in_trouble = False

    def call(self, function: Callable[[], _Result], try_s: float, patience_s: float) -> _Result:
        """Return the result of a function; call the function again while the store is silent.

        Args:
            function: The function. Repeating it must do no harm.
            try_s: How many seconds one try may take.
            patience_s: For how many seconds tries begin.
        """
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                result = function()
            except Exception as error:
                if not may_pass(error):
                    raise
                passed_s = time.monotonic() - began
                left_s = patience_s - passed_s
                # A short silence is not worth a line.
                if left_s <= 0 or passed_s >= _REPORTED_AFTER * try_s:
                    self.note_trouble(error, max(left_s, 0.0))
                if left_s <= 0:
                    raise
                # Random: many ranks must not ask a recovering store at the same moment.
                time.sleep(min(_random.uniform(pause_s / 2, pause_s), left_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE * try_s)
            else:
                self.note_answer()
                return result

    def note_trouble(self, error: Exception, left_s: float = 0.0) -> None:
        """Report a silent store, once until the store answers again."""
        with self._lock:
            if self._is_in_trouble:
                return
            self._is_in_trouble = True
            reason = str(error).partition("\n")[0]
            goes_on = f"; it is asked again for {left_s:.0f} s" if left_s else ""
            logger.warning("The store %s does not answer%s: %s", self._url, goes_on, reason)
            self._report(reason)

    def note_answer(self) -> None:
        """Report a store answering again after a reported silence."""
        with self._lock:
            if not self._is_in_trouble:
                return
            self._is_in_trouble = False
            logger.warning("The store %s answers again.", self._url)
            self._report(None)

    def _report(self, reason: str | None) -> None:
        try:
            if self.on_trouble is not None:
                self.on_trouble(reason)
        except Exception:
            # The report must not stop the call itself.
            logger.exception("The state of the store %s cannot be reported.", self._url)


_PART = re.compile(r"[?&]partNumber=(\d+)")
_BEGINNING = re.compile(r"[?&]uploads\b")
# The answer of a store that refuses a request, and its text.
_XML = re.compile(r"<\?xml|<Error>")
_SAID = re.compile(r"<(?:Code|Message)>(.*?)</", re.DOTALL)
_STORE_NAME = re.compile(r"^Generic \w+ error: ")


def words_of(text: str) -> str:
    """Return the first line of an error, with the store's own message from an XML answer."""
    # After it, the client repeats the same text.
    text = text.partition("\n\nDebug source:")[0]
    if said := _SAID.findall(text):
        told = (html.unescape(each.strip().splitlines()[0]) for each in said if each.strip())
        text = ": ".join([_XML.split(text)[0].rstrip(" :\n\ufeff"), *told])
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return _STORE_NAME.sub("", line).rstrip(".")


def part_of(text: str, upload: Upload) -> str:
    """Return the part of a file named by an error."""
    found = _PART.search(text)
    if found is not None:
        return f"part {found[1]} of {upload.num_parts}"
    if upload.num_parts == 1:
        return "part 1 of 1"
    where = "before part 1" if _BEGINNING.search(text) else "a part"
    return f"{where} of {upload.num_parts}"
