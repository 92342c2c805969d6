"""Program reporting a run without a master to a master, beside the run's script.

`core.init(master=...)` starts it as ``python -m paceline.client._report_run RUN_DIR URL``. Its
standard input ends with the script. It then sends the rest, and closes its output. If that does not
succeed at once, or other ranks are still at work, it continues without the script until all is
sent. It gives up when no master has answered for ten minutes by default.
"""

import math
import os
import select
import sys
import time
from pathlib import Path

from paceline.client._client import Client
from paceline.client._code_and_run_uploads import RunSync
from paceline.client._http_session import (
    REPORT_PATIENCE_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    ApiError,
    MasterUnreachableError,
    given_token,
    home_directory,
    read_master_file,
)

_INTERVAL_S = 1.0
_LONGEST_PAUSE_S = 30.0
_PATIENCE_S = 600.0
# The master takes a run for lost after so long without news.
_LEASE_S = 60.0
# Another try can do no better.
_FINAL_STATUSES = frozenset({400, 409, 413, 422})
_STDIN, _STDOUT, _STDERR = 0, 1, 2


class _Reporter:
    def __init__(self, path: Path, master: str) -> None:
        self._path = path
        self._client = Client(master)
        self._master = master
        self._sync = RunSync(self._client, path, lease_s=_LEASE_S)
        self._has_script = True
        self._deadline = float("inf")
        self._pause_s = _INTERVAL_S
        self._has_arrived = False
        self._last_said = ""

    def run(self) -> int:
        """Report until the run has ended and all was sent; return the exit code."""
        while True:
            end = self._send()
            if end is not None:
                return end
            if self._has_script:
                self._await_script()
                continue
            # Script waits no longer: data not sent at once is sent in the background.
            self._leave_script()
            if time.monotonic() > self._deadline:
                return 1
            time.sleep(self._pause_s)

    def _send(self) -> int | None:
        """Send everything new; return an exit code when the work is done, else None."""
        if (missing := self._missing_token()) is not None:
            self._fail(missing)
            return None
        try:
            result = self._sync.send()
        except ApiError as error:
            self._fail(f"The master at {self._master} refuses it: {error.detail}")
            # Another token may lie in the file.
            self._client.close()
            return 1 if error.status in _FINAL_STATUSES else None
        except MasterUnreachableError as error:
            self._fail(str(error))
            return None
        self._pause_s, self._last_said = _INTERVAL_S, ""
        if not self._has_arrived:
            self._has_arrived = True
            page = f"{self._client.url}/experiments/{result.experiment_id}"
            self._say(f"The run {self._sync.name} is shown at {page}")
        if not self._has_script:
            self._deadline = time.monotonic() + _patience_s()
        return None if result.is_alive else 0

    def _missing_token(self) -> str | None:
        """Return the problem of the token; another master's home token is never sent."""
        try:
            if given_token() is not None:
                return None
        except MasterUnreachableError as error:
            return str(error)
        file = read_master_file(home_directory())
        url = self._master if "://" in self._master else f"http://{self._master}"
        if file is not None and file.url == url.rstrip("/"):
            return None
        return (
            f"A token for {self._master} is needed. Hint: `paceline token create NAME --scope"
            f" report` on its machine makes one; set {TOKEN_VARIABLE} to it, or"
            f" {TOKEN_FILE_VARIABLE} to a file that has it."
        )

    def _fail(self, why: str) -> None:
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2)
        if why != self._last_said:
            self._say(
                f"{why} The run {self._sync.name} continues; its records are kept in {self._path}."
            )
            self._last_said = why

    def _await_script(self) -> None:
        """Wait for the next time to send; less long if the script ends."""
        readable, _, _ = select.select([_STDIN], [], [], self._pause_s)
        if readable and not os.read(_STDIN, 1024):
            self._has_script = False
            self._deadline = time.monotonic() + _patience_s()

    def _leave_script(self) -> None:
        """Release the waiting script and its terminal; print there the amount not sent yet."""
        if self._last_said:
            in_time = (
                f" It is sent in the background for up to {_patience_s():.0f} s."
                if _patience_s() > 0
                else ""
            )
            self._say(
                f"The run {self._sync.name} has ended, and not all of it was sent.{in_time}"
                f" Hint: `paceline sync {self._path}` sends it later."
            )
        nothing = os.open(os.devnull, os.O_RDWR)
        # Output moved to /dev/null: the waiting script reads the end of the file.
        for descriptor in (_STDOUT, _STDERR):
            os.dup2(nothing, descriptor)
        os.close(nothing)

    @staticmethod
    def _say(text: str) -> None:
        print(f"paceline: {text}", file=sys.stderr, flush=True)


def _patience_s() -> float:
    try:
        patience_s = float(os.environ.get(REPORT_PATIENCE_VARIABLE) or _PATIENCE_S)
    except ValueError:
        return _PATIENCE_S
    # Nothing is after a time that is no number.
    return _PATIENCE_S if math.isnan(patience_s) else patience_s


def main() -> int:
    """Report a run from a child process; the started process itself returns at once."""
    if os.fork() != 0:
        # Whoever started it need not wait for the work, and leaves no zombie.
        os._exit(0)
    path, master = sys.argv[1:]
    return _Reporter(Path(path), master).run()


if __name__ == "__main__":
    sys.exit(main())
