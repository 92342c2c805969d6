"""Fork processes that have modules loaded, so that none of them takes the time to load them.

Each request brings the files that become standard output and error. Apart from what is loaded, a
process is as in an interpreter of its own: what it runs is the main module, with its own
arguments, variables, directory, signals and end.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys


def serve(channel: socket.socket) -> list[str]:
    """Fork until nobody asks any more, and tell how they end; return the command to run."""
    poll, running = select.poll(), {}
    poll.register(channel, select.POLLIN)
    while True:
        ready = [number for number, _ in poll.poll()]
        for number in running.keys() & ready:
            poll.unregister(number)
            os.close(number)
            pid = running.pop(number)
            told = {"pid": pid, "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
            try:
                channel.send(json.dumps(told).encode())
            except BrokenPipeError:
                os._exit(0)
        if channel.fileno() not in ready:
            continue
        try:
            message, files, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        except ConnectionResetError:  # some ends have been told of that nobody asked for
            os._exit(0)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            channel.close()
            for number in running:
                os.close(number)
            return take_place(files, **json.loads(message))
        number = os.pidfd_open(pid)
        running[number] = pid
        poll.register(number, select.POLLIN)
        for file in files:
            os.close(file)
        channel.send(json.dumps({"pid": pid}).encode())


def take_place(
    files: list[int],
    command: list[str],
    directory: str,
    environment: dict[str, str],
    has_session: bool = False,
) -> list[str]:
    """Take the place that a request describes, and return the command."""
    if has_session:
        os.setsid()
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return command


number, *modules = sys.argv[1:]
for name in modules:
    importlib.import_module(name)
# Nobody looks for garbage among what is loaded, neither at the end of a process.
gc.collect()
gc.freeze()
command = serve(socket.socket(fileno=int(number)))
if command[0] == "-m":
    sys.argv[:] = command[1:]
    sys.path[0] = os.getcwd()
    runpy.run_module(command[1], run_name="__main__", alter_sys=True)
else:
    sys.argv[:] = command
    sys.path[0] = os.path.dirname(command[0])
    runpy.run_path(command[0], run_name="__main__")
