"""Guard of a runner: runs the runner, and sends SIGTERM once the guard's input is closed.

The nodes of a Ray cluster get this file as text, as their interpreter may lack Paceline. The first
line of the input is the order, as JSON. The output says why the runner failed, if it did.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from typing import Any


def main() -> None:
    """Start the runner in a new session, and return after its end."""
    # Ray kills the children of an actor with it, but a runner must let its attempts leave.
    if os.fork():
        os._exit(0)
    os.setsid()
    order = json.loads(sys.stdin.readline())
    try:
        directory = _make_directory(order)
        error = _run_guarded(order["command"], directory)
    except OSError as failure:
        error = str(failure)
    if error is not None:
        print(json.dumps(error), flush=True)


def _make_directory(order: dict[str, Any]) -> str:
    os.umask(0o077)
    directory: str = os.path.join(os.path.expanduser(order["directory"]), order["name"])
    os.makedirs(directory, exist_ok=True)
    for name, text in (("token", order["token"]), ("master.pem", order["certificate"])):
        if text is not None:
            with open(os.path.join(directory, name), "w") as file:
                file.write(text)
    return directory


def _run_guarded(command: list[str], directory: str) -> "str | None":
    path = os.path.join(directory, "runner.log")
    with open(path, "ab") as log:
        runner = subprocess.Popen(
            [*command, "--dir", directory, "--token-file", os.path.join(directory, "token")],
            cwd=directory,
            env=_runner_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def end_with_input() -> None:
        sys.stdin.read()
        runner.terminate()

    threading.Thread(target=end_with_input, daemon=True).start()
    code = runner.wait()
    if code:
        with open(path, "rb") as printed:
            lines = printed.read()[-4096:].decode(errors="replace").strip().splitlines()
        return f"It ended with exit code {code}: {lines[-1] if lines else 'it printed nothing'}"
    if not os.listdir(os.path.join(directory, "attempts")):
        # Nobody comes back for it: the next runner has another name.
        shutil.rmtree(directory, ignore_errors=True)
    return None


def _runner_environment() -> dict[str, str]:
    # Ray's own variables are for its processes; only the cluster's address is for others. The
    # number of threads comes from Ray for its actors, not the user's wish.
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("RAY_ADDRESS", "RAY_AUTH"))
        or not name.startswith(("RAY_", "OMP_NUM_THREADS"))
    }
    # `python3` is Ray's interpreter here, unless another one is named.
    programs = os.path.dirname(sys.executable)
    return {**kept, "PATH": f"{programs}:{kept.get('PATH', os.defpath)}"}


if __name__ == "__main__":
    main()
    # The thread that reads the input holds it.
    os._exit(0)
