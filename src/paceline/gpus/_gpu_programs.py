"""Programs that tell of GPUs, and the limit of time for each."""

import logging
import shutil
import subprocess
from contextlib import suppress

logger = logging.getLogger(__name__)

_LIMIT_S = 20.0
# A process that hangs in a driver may not end even when it is killed.
_KILL_S = 2.0


def run_gpu_program(name: str, *arguments: str) -> str:
    """Return the output of a program; nothing if it is not there, fails or takes too long."""
    program = shutil.which(name)
    if program is None:
        return ""
    try:
        return ask_gpu_program([program, *arguments], name)
    except subprocess.TimeoutExpired:
        pass  # told already
    except subprocess.CalledProcessError as error:
        told = f"{error.stderr}\n{error.output}".split("\n")
        why = next((line.strip() for line in told if line.strip()), "nothing was said")
        code = error.returncode
        logger.warning("%s does not tell of the GPUs: it ended with %d: %s", name, code, why)
    except OSError as error:
        logger.warning("%s does not tell of the GPUs: %s", name, error)
    return ""


def ask_gpu_program(command: list[str], what: str) -> str:
    """Return the output of a command.

    Args:
        command: The program and its arguments.
        what: What is asked, for the log.

    Raises:
        OSError: It cannot be started.
        subprocess.CalledProcessError: It failed.
        subprocess.TimeoutExpired: It took too long, and was killed.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        output, complaint = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        logger.warning("%s does not tell of the GPUs: no answer for %g s.", what, _LIMIT_S)
        raise
    finally:
        _end_process(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, complaint)
    return output


def _end_process(process: "subprocess.Popen[str]") -> None:
    """End a process and give its pipes up, in bounded time."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
