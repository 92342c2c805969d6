"""A Ctrl-C takes effect wherever a driver waits, also if it does not wake the wait."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

# The signal arrives in another thread, so that the main thread, which handles it, is not woken: as
# if it had arrived just before the main thread began to wait.
PREAMBLE = """
import os, signal, sys, threading, time

SIGNAL = signal.SIGINT

def interrupt():
    while not os.path.exists("running"):
        time.sleep(0.01)
    # The main thread waits by now.
    time.sleep(1)
    signal.pthread_kill(threading.get_ident(), SIGNAL)

def work(*args):
    open("running", "w").close()
    time.sleep(600)

if __name__ == "__main__":
    threading.Thread(target=interrupt, daemon=True).start()
"""

INTERRUPTED = -signal.SIGINT

DRIVERS = {
    "a call of a pool": """
from paceline._training.workers.process_pools import LocalPool
with LocalPool(1) as pool:
    pool.submit(work).wait()
""",
    # Its workers come from a process that never gets ready.
    "the start of a pool": """
from pathlib import Path
from paceline._training.workers.process_pools import LocalPool
Path("sitecustomize.py").write_text(
    "import os, time\\nopen('running', 'w')\\n"
    f"while os.getppid() == {os.getpid()}: time.sleep(0.1)"
)
LocalPool(1, environment={"PYTHONPATH": os.getcwd()}).start()
""",
    "train": """
from paceline import train
train.Trainer(num_workers=1).execute(work)
""",
    "creators": """
from paceline import creators
creators.PyTorchTrainer(work, work, work, work)
""",
    "pytorch.launch": """
from paceline import pytorch
pytorch.launch(work, 2)
""",
    "the launcher": """
from pathlib import Path
from paceline.launch.torch_distributed import main
Path("train.py").write_text("import time; open('running', 'w'); time.sleep(600)")
sys.exit(main(["--nproc-per-node", "2", "train.py"]))
""",
    "the command line": """
from pathlib import Path
from paceline.cli import main
SIGNAL = signal.SIGTERM
Path("config.yaml").write_text(
    "{name: x, entrypoint: [sh, -c, touch running; sleep 600], searcher: {name: single, metric: x}}"
)
sys.argv[1:] = ["e", "create", "config.yaml", ".", "--local"]
main()
""",
    "the client": """
from paceline.client import Client
with Client(sys.argv[1], "token") as client:
    next(client.events(after=0))
    open("running", "w").close()
    next(client.events(after=1))
""",
}
CODES = {"the launcher": 130, "the command line": 128 + signal.SIGTERM}


class OneEvent(BaseHTTPRequestHandler):
    """A master that has one event to tell, and after that nothing for ever."""

    is_over = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if "events" not in self.path:
            self.wfile.write(b"{}")
            return
        if "after=0" in self.path:
            event = '{"id": 1, "time": 0.0, "experiment_id": 1, "trial_id": null,'
            self.wfile.write(f'id: 1\ndata: {event} "kind": "x", "data": {{}}}}\n\n'.encode())
        self.is_over.wait(600)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    OneEvent.is_over.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), OneEvent)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    OneEvent.is_over.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.long
@pytest.mark.parametrize("name", DRIVERS)
def test_a_ctrl_c_takes_effect_though_it_does_not_wake_the_wait(
    name: str, tmp_path: Path, clean_environment: dict[str, str], url: str
) -> None:
    indented = "".join(f"    {line}\n" for line in DRIVERS[name].splitlines())
    (tmp_path / "driver.py").write_text(PREAMBLE + indented)
    process = subprocess.Popen(
        [sys.executable, "driver.py", url],
        cwd=tmp_path,
        env=clean_environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
        raise AssertionError(f"The driver waits on: {errors}") from None
    assert process.returncode == CODES.get(name, INTERRUPTED), errors
    if name not in CODES:
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
