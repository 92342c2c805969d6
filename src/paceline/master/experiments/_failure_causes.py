"""Causes of failed attempts as they are compared: without what differs by chance."""

import re
from typing import Any

# Which rank fails first, and where and when, is a matter of chance.
_BY_CHANCE = re.compile(
    r"""
      \bNode\ \d+(?:\ \([^)\n]*\))?:\ ?
    | ,\ the\ first\ of\ \d+\ to\ fail
    | \b[Rr]ank[\ _=-]?\d+\b
    | \b(?:cuda|[Gg][Pp][Uu])[:\ ]\d+\b
    | \b0x[0-9a-fA-F]+\b
    | \b\d{4}-\d\d-\d\d(?:[T\ ]\d\d:\d\d(?::\d\d)?)?(?:[.,]\d+)?(?:Z\b|[+-]\d\d:?\d\d\b)?
    | \b\d\d:\d\d:\d\d(?:[.,]\d+)?
    | \b\d+(?:\.\d+)?\ ?(?:ns|us|µs|ms|s|seconds?|minutes?)\b
    | \b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b
    | (?:\[[0-9a-fA-F:]+\]|\blocalhost):\d+\b
    | \b(?:port|pid|process)[\ :=]\d+\b
    | (?<=/attempts/)\d+(?=/)
    """,
    re.VERBOSE,
)


def cause_of_end(exit_: dict[str, Any]) -> tuple[int | None, str | None]:
    """Return the code and the comparable text of how an attempt ended, as it is stored.

    A launcher names the rank that failed first; what rank 0 says may only answer it.
    """
    told = exit_.get("error") or exit_.get("detail")
    if exit_.get("is_launch_error"):
        told = exit_.get("detail")
    return exit_["code"], None if told is None else comparable(told)


def comparable(text: str) -> str:
    """Return a text without ranks, times, addresses and numbers of attempts and processes."""
    return _BY_CHANCE.sub("*", text)
