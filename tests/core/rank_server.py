"""Fork ranks of scripts, with torch loaded, so that none of them takes the time to load it.

Each request brings the files that become standard output and error of a rank. Apart from what is
loaded, a rank is as in an interpreter of its own: its script is the main module, with its own
variables, directory, signals and end.
"""

import json
import os
import runpy
import signal
import socket
import sys

import torch.distributed  # noqa: F401 # for the ranks

import paceline.core  # noqa: F401 # for the ranks


def serve(channel: socket.socket) -> str:
    """Fork ranks until nobody asks any more, and tell how they end; return to be one."""
    num_running = 0
    while True:
        channel.settimeout(0.02 if num_running else None)
        try:
            message, files, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        except TimeoutError:
            pid, status = os.waitpid(-1, os.WNOHANG) if num_running else (0, 0)
            if pid:
                num_running -= 1
                told = {"pid": pid, "code": os.waitstatus_to_exitcode(status)}
                channel.send(json.dumps(told).encode())
            continue
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            channel.close()
            return become_rank(files, **json.loads(message))
        num_running += 1
        for file in files:
            os.close(file)
        channel.send(json.dumps({"pid": pid}).encode())


def become_rank(files: list[int], script: str, directory: str, environment: dict[str, str]) -> str:
    """Take the place that a request describes, and return the script."""
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = [script]
    sys.path[0] = os.path.dirname(script)
    return script


runpy.run_path(serve(socket.socket(fileno=int(sys.argv[1]))), run_name="__main__")
