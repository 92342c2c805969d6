"""Tools for tests of code that uses Paceline: fault injection."""

from paceline.testing import faults

__all__ = ["faults"]
