"""Why an exactness check could not give a verdict.

VerificationError
|-- ScriptFailedError   the script fails, or does not end, by itself
|-- NotResumableError   there is nothing that a resumed run could go on from
`-- FaultMissedError    the fault did not interrupt the script
"""


class VerificationError(RuntimeError):
    """Raised when it cannot be told whether a script resumes exactly."""


class ScriptFailedError(VerificationError):
    """Raised when the straight run fails or takes too long."""


class NotResumableError(VerificationError):
    """Raised when a script does not use Paceline, or had stored no checkpoint to go on from."""


class FaultMissedError(VerificationError):
    """Raised when a run ended before its fault came."""
