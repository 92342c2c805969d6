"""Modules that some tests need: looked for when tests are collected, and loaded when they run.

Each process of a run collects all tests, and would otherwise load what few of them use.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Needed:
    """A module that loads when something of it is used; tests that need it skip without it.

    Args:
        name: A module outside all packages.
        reason: What the skipped tests say.
    """

    def __init__(self, name: str, reason: str | None = None) -> None:
        if find_spec(name) is None:
            pytest.skip(reason or f"NOT TESTED: needs {name}", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "pytestmark":
            # The collection of tests asks each global for such names.
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
