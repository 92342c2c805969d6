"""Tools for tests of code that uses Paceline: exactness on resume, faults, search methods."""

from typing import TYPE_CHECKING

# The points stand in Paceline's own code, so this must load nothing else.
from paceline import faults
from paceline._late_names import late_names

if TYPE_CHECKING:
    from paceline.testing._compare_runs import Difference
    from paceline.testing._errors import (
        FaultMissedError,
        NotResumableError,
        ScriptFailedError,
        VerificationError,
    )
    from paceline.testing._fault_steps import Fault
    from paceline.testing._search_method import check_search_method
    from paceline.testing._verdict import FaultOutcome, Verdict
    from paceline.testing._verify_resume import verify_resume

_PLACES = {
    "Difference": "_compare_runs",
    "Fault": "_fault_steps",
    "FaultMissedError": "_errors",
    "FaultOutcome": "_verdict",
    "NotResumableError": "_errors",
    "ScriptFailedError": "_errors",
    "Verdict": "_verdict",
    "VerificationError": "_errors",
    "check_search_method": "_search_method",
    "verify_resume": "_verify_resume",
}

__all__ = [
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
    "verify_resume",
]

__getattr__ = late_names(__name__, _PLACES)
