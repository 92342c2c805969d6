"""Tools for testing code based on Paceline: exact resume, faults, search methods."""

from typing import TYPE_CHECKING

# The points stand in Paceline's own code, so this must load nothing else.
from paceline import faults
from paceline._base.imports import late_names

if TYPE_CHECKING:
    from paceline.testing._compare_runs import (
        Difference,
        FaultMissedError,
        NotResumableError,
        ScriptFailedError,
        VerificationError,
    )
    from paceline.testing._search_method import check_search_method
    from paceline.testing._verify_command import CommandVerdict, verify_command
    from paceline.testing._verify_resume import Fault, FaultOutcome, Verdict, verify_resume

_PLACES = {
    "CommandVerdict": "_verify_command",
    "Difference": "_compare_runs",
    "Fault": "_verify_resume",
    "FaultMissedError": "_compare_runs",
    "FaultOutcome": "_verify_resume",
    "NotResumableError": "_compare_runs",
    "ScriptFailedError": "_compare_runs",
    "Verdict": "_verify_resume",
    "VerificationError": "_compare_runs",
    "check_search_method": "_search_method",
    "verify_command": "_verify_command",
    "verify_resume": "_verify_resume",
}

__all__ = [
    "CommandVerdict",
    "Difference",
    "Fault",
    "FaultMissedError",
    "FaultOutcome",
    "NotResumableError",
    "ScriptFailedError",
    "Verdict",
    "VerificationError",
    "check_search_method",
    "faults",
    "verify_command",
    "verify_resume",
]


__getattr__ = late_names(__name__, _PLACES)
