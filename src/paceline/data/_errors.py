"""Exceptions of data sets.

DataError
├── DataChangedError
├── DataFormatError
└── DataNotFoundError (also a FileNotFoundError)
"""


class DataError(Exception):
    """The base of all errors about files of data; the message names the file."""


class DataChangedError(DataError):
    """Raised when a file is not the one that it was when the data set was made."""


class DataFormatError(DataError):
    """Raised when a file is damaged, cut off, or has other columns than the files before it."""


class DataNotFoundError(DataError, FileNotFoundError):
    """Raised when there is no file."""
