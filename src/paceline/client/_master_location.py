"""Location of the master: environment variables, and files in its home.

| variable           | meaning                                            |
|--------------------|----------------------------------------------------|
| `PACELINE_HOME`    | the master's home, `~/.paceline` by default        |
| `PACELINE_MASTER`  | the master's URL, instead of the home's master.json |
| `PACELINE_TOKEN`   | the token, instead of the home's token file        |
| `PACELINE_TOKEN_FILE` | a file that has the token, instead of the home's |
| `PACELINE_CA_FILE` | certificates that are trusted, instead of the system's |
"""

import os
from pathlib import Path

import msgspec

from paceline._checked_secrets import DamagedSecretError, read_secret
from paceline._regular_files import NotRegularFileError, read_regular
from paceline._sealed_json import check_seal
from paceline.client._errors import MasterUnreachableError

HOME_VARIABLE = "PACELINE_HOME"
MASTER_VARIABLE = "PACELINE_MASTER"
TOKEN_VARIABLE = "PACELINE_TOKEN"  # noqa: S105 - the name of a variable, no secret
TOKEN_FILE_VARIABLE = "PACELINE_TOKEN_FILE"  # noqa: S105 - the same
REPORT_PATIENCE_VARIABLE = "PACELINE_REPORT_PATIENCE_S"
START_COMMAND = "paceline up --detach"


class MasterFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `master.json`, which a running master keeps in its home.

    `url` is for programs on its machine, `public_url` for those on others; `host` is the address
    that it listens on. `certificate` is its own (PEM), if it has one.
    """

    url: str
    pid: int
    port: int
    version: str
    host: str = ""
    certificate: str | None = None
    public_url: str = ""

    @property
    def shown_url(self) -> str:
        """The URL to show to people."""
        return self.public_url or self.url


class MasterAccess(msgspec.Struct, frozen=True):
    """URL and token of a master, and its certificate if that is known from its home."""

    url: str
    token: str
    certificate: str | None = None


def home_directory() -> Path:
    """Return the home that the environment names, by default `~/.paceline`."""
    return Path(os.environ.get(HOME_VARIABLE) or "~/.paceline").expanduser().absolute()


def read_master_file(home: Path) -> MasterFile | None:
    """Return what the master of this home says of itself; None when none runs.

    The file outlives a master that was killed, so a file is no proof that one answers.
    """
    try:
        data = check_seal(read_regular(home / "master.json"))
        return msgspec.json.decode(data, type=MasterFile)
    except (FileNotFoundError, NotADirectoryError, NotRegularFileError, msgspec.DecodeError):
        return None


def read_token(home: Path) -> str:
    """Return the token of this home.

    Raises:
        MasterUnreachableError: It cannot be read, or is damaged.
    """
    path = home / "token"
    try:
        return read_secret(path)
    except OSError as error:
        raise MasterUnreachableError(
            f"The master's token must be readable at {str(path)!r}, but it is not"
            f" ({error.strerror}). Hint: set `{TOKEN_VARIABLE}`, or set `{HOME_VARIABLE}` to the"
            " master's home."
        ) from error
    except DamagedSecretError as error:
        raise MasterUnreachableError(
            f"{error} Hint: a master makes a new one when it starts (`paceline down`, then"
            f" `{START_COMMAND}`)."
        ) from error


def given_token() -> str | None:
    """Return the token that the environment has or names, None if it has none.

    Raises:
        MasterUnreachableError: The file cannot be read, or is damaged.
    """
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    path = os.environ.get(TOKEN_FILE_VARIABLE)
    if not path:
        return None
    try:
        return read_secret(Path(path).expanduser(), is_named=True)
    except (OSError, DamagedSecretError) as error:
        raise MasterUnreachableError(
            f"`{TOKEN_FILE_VARIABLE}` must name a file with a token, but {path!r} cannot be read"
            f" ({error})."
        ) from error


def find_master(master: str | None = None, token: str | None = None) -> MasterAccess:
    """Return the master's address: the arguments, else the environment, else the home's files.

    Raises:
        MasterUnreachableError: No master runs in the home, or its token cannot be read.
    """
    home = home_directory()
    url = master or os.environ.get(MASTER_VARIABLE)
    file = read_master_file(home)
    if not url:
        if file is None:
            raise MasterUnreachableError(
                f"A master must run in {str(home)!r}, but none does."
                f" Hint: start one with `{START_COMMAND}`."
            )
        url = file.url
    if "://" not in url:
        url = f"http://{url}"
    url = url.rstrip("/")
    return MasterAccess(
        url,
        token or given_token() or read_token(home),
        file.certificate if file is not None and file.url == url else None,
    )
