"""Exceptions of data sets."""


class DataError(Exception):
    """The base of all errors about files of data; the message names the file."""


class DataChangedError(DataError):
    """Raised when a file has changed since the data set was made."""


class DataFormatError(DataError):
    """Raised when a file is damaged, cut off, or has other columns than the first."""


class DataNotFoundError(DataError, FileNotFoundError):
    """Raised when there is no file."""
