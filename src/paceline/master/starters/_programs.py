"""Running the programs of a cluster."""

import subprocess
from collections.abc import Sequence

from paceline.master.starters._starter_base import StarterError

_TIMEOUT_S = 60.0


def run_program(command: Sequence[str], text: str = "", *, timeout_s: float = _TIMEOUT_S) -> str:
    """Run a program with a text as its input and return what it prints.

    Raises:
        StarterError: It is not installed, fails, or takes too long.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError as error:
        raise StarterError(
            f"`{command[0]}` must be installed on the machine of the master, but is not."
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StarterError(f"`{command[0]}` failed: {type(error).__name__}.") from error
    if done.returncode != 0:
        said = " | ".join(done.stderr.strip().splitlines()[-3:]) or "it printed nothing"
        raise StarterError(f"`{command[0]}` failed with exit code {done.returncode}: {said}")
    return done.stdout
