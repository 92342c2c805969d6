"""Exceptions of the client.

ClientError
├── ApiError                the master refused a request
├── MasterUnreachableError  no master answers
├── ContextError            a directory cannot be sent as an experiment's code
├── DownloadError           a checkpoint or code cannot be copied
└── NoCheckpointError       there is no checkpoint yet
"""

from paceline._errors import PicklableError


class ClientError(RuntimeError):
    """Base of all errors that the client raises on purpose."""


class ApiError(PicklableError, ClientError):
    """Raised when the master refused a request.

    Attributes:
        status: The HTTP status.
        code: The stable code of the error, for programs.
        detail: The explanation, for people.
    """

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail


class MasterUnreachableError(ClientError):
    """Raised when no master answers; the message holds the command that starts one."""


class ContextError(ClientError, ValueError):
    """Raised when a directory cannot be sent as an experiment's code."""


class DownloadError(ClientError):
    """Raised when a checkpoint cannot be copied to the wanted place."""


class NoCheckpointError(ClientError, LookupError):
    """Raised when an experiment or trial has no checkpoint yet."""
