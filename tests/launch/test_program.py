"""A Python program under the launcher sees what it would see under plain Python."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import launch as launch_package
from paceline._training.workers.processes import worker_program as _worker_program
from paceline.core import _attempt_journal

Launch = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

FACTS = """
import pickle, sys
class Local: pass
assert type(pickle.loads(pickle.dumps(Local()))) is Local
main = sys.modules["__main__"]
print(__name__, __file__, __package__, __spec__ and __spec__.name, sys.argv, sys.path[0])
print(main.__dict__ is globals(), sorted(globals().keys() - {"__cached__"}))
"""


def _closing_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "program",
    [
        ["python3", "sub/facts.py", "a", "--b"],
        ["python3", "-u", "-O", "sub/facts.py"],
        ["python3", "-m", "sub.facts", "x"],
        ["python3", "-m", "package", "-x"],
        ["python3", "-P", "sub/facts.py"] if sys.version_info >= (3, 11) else ["python3", "-V"],
    ],
)
def test_a_program_sees_what_plain_python_shows_it(
    launch: Launch, script: Script, tmp_path: Path, program: list[str]
) -> None:
    script(FACTS, "sub/facts.py")
    script(FACTS, "package/__main__.py")
    script("", "package/__init__.py")
    plain = subprocess.run(
        [sys.executable, *program[1:]], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    result = launch("--", *program)
    assert (result.returncode, result.stdout) == (0, plain.stdout), result.stderr


@pytest.mark.parametrize(
    ("statement", "code", "text"),
    [
        ("sys.exit(3)", 3, None),
        ("sys.exit()", 0, None),
        ("sys.exit(None)", 0, None),
        ("sys.exit(True)", 1, None),
        ("sys.exit(256)", 0, None),
        ("sys.exit('no data')", 1, "no data"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("os._exit(7)", 7, None),
    ],
)
def test_exits_have_the_code_of_plain_python(
    launch: Launch, script: Script, statement: str, code: int, text: str | None
) -> None:
    result = launch(script(f"import os, sys\n{statement}\n"))
    assert result.returncode == code
    if text is not None:
        assert text in result.stderr
    if code != 0:
        assert f"ERROR: Rank 0 exited with code {code}" in _closing_line(result)


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    raise ValueError('boom')\nf()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e\n",
        "import os\n\nif True print('x')\n",
        "import missing_module\n",
    ],
)
def test_a_traceback_is_that_of_plain_python(
    launch: Launch, script: Script, tmp_path: Path, text: str
) -> None:
    name = script(text)
    plain = subprocess.run(
        [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    result = launch(name)
    assert result.returncode == plain.returncode == 1
    lines = result.stderr.splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith(("INFO: ", "ERROR: "))).replace(
        f'"{name}"', f'"{tmp_path / name}"'
    ) == plain.stderr.replace(f'"{name}"', f'"{tmp_path / name}"')
    assert plain.stderr.splitlines()[-1] in _closing_line(result)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "import concurrent.futures\n"
            "def reduce():\n"
            "    raise {}\n"
            "concurrent.futures.ThreadPoolExecutor().submit(reduce).result()\n",
            "3, in reduce",
        ),
        # Raised in Python's own library.
        (
            "from concurrent.futures import Future\n"
            "lost = Future()\n"
            "lost.set_exception({})\n"
            "lost.result()\n",
            "4, in <module>",
        ),
    ],
)
def test_a_rank_that_lost_another_says_where_in_one_line(
    launch: Launch, script: Script, text: str, place: str
) -> None:
    error = "RuntimeError('[gloo/transport/tcp/pair.cc:537] Connection reset by peer')"
    name = script(text.format(error))
    line, closing = launch(name).stderr.splitlines()[-2:]
    assert re.search(rf"lost another one at \S*{name}:{place}; the launcher says", line)
    assert line.endswith("[gloo/transport/tcp/pair.cc:537] Connection reset by peer)")
    assert closing.startswith("ERROR: ")


GROUP = """
import sys
{}
from torch import distributed
distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
raise RuntimeError('[gloo/transport/tcp/pair.cc:537] Connection reset by peer')
"""


@pytest.mark.parametrize("hook", ["", "sys.excepthook = lambda *e: print('hook', e[0].__name__)"])
def test_a_rank_of_a_process_group_that_lost_another_has_no_traceback(
    launch: Launch, script: Script, hook: str
) -> None:
    """A process group puts a hook of torch's before that of Python or of the user."""
    result = launch(script(GROUP.format(hook)))
    assert "Traceback" not in result.stderr, f"{result.stderr}"
    assert ("lost another one at" in result.stderr) == (not hook), f"{result.stderr}"
    assert ("hook RuntimeError" in result.stdout) == bool(hook), f"{result.stdout}"


@pytest.mark.long
def test_an_error_of_the_users_code_shows_the_users_frames(launch: Launch, script: Script) -> None:
    """Frames of Paceline that call the code are counted; those after it, where it erred, stay."""
    text = """
import torch
from paceline import pytorch

class Own(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        model = context.wrap_model(torch.nn.Linear(1, 1))
        context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        {}

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.ones(8, 1), batch_size=2)

    build_validation_data_loader = evaluate_batch = build_training_data_loader

with pytorch.init({{"global_batch_size": 2}}) as context:
    pytorch.Trainer(Own(context), context).fit(max_length=pytorch.Batch(2))
"""
    own = launch(script(text.format("raise ValueError('mine')"))).stderr
    assert re.search(r"fit\(.*\n(.*\^\n)?  \.\.\. \d+ frames of Paceline \.\.\.\n", own), own
    assert "_training_loop.py" not in own, f"{own}"
    assert "in train_batch" in own, f"{own}"
    ours = launch(script(text.format("self.context.get_hparam('nowhere')"))).stderr
    assert re.search(r"in train_batch\n.*\n(.*\n)?  File \".*paceline.*\n", ours), ours


def test_a_hook_for_exceptions_is_called(launch: Launch, script: Script) -> None:
    result = launch(
        script("import sys\nsys.excepthook = lambda *e: print('hook', e[1])\nraise OSError('x')")
    )
    assert (result.returncode, result.stdout) == (1, "hook x\n")


def test_threads_and_exit_handlers_finish_in_the_order_of_plain_python(
    launch: Launch, script: Script
) -> None:
    text = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor
atexit.register(print, "handler 1")
atexit.register(print, "handler 2")
is_over = threading.Event()
threading.Thread(target=lambda: (is_over.wait(), time.sleep(0.5), print("thread"))).start()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
ThreadPoolExecutor(1).submit(print, "pool").result()
print("end")
is_over.set()
"""
    result = launch(script(text))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n") == ["pool", "end", "thread", "handler 2", "handler 1", ""]


def test_exit_handlers_run_after_an_error(launch: Launch, script: Script) -> None:
    result = launch(script("import atexit\natexit.register(print, 'handled')\n1 / 0\n"))
    assert (result.returncode, result.stdout) == (1, "handled\n")


def test_lines_come_through_before_the_program_ends(
    start_launcher: Callable[..., subprocess.Popen[str]], script: Script
) -> None:
    process = start_launcher(script("import time\nprint('first')\ntime.sleep(600)\n"))
    assert process.stdout is not None
    assert process.stdout.readline() == "first\n"


def test_child_processes_find_no_channel_to_write_to(launch: Launch, script: Script) -> None:
    result = launch(script("import os; print([k for k in os.environ if 'CHANNEL' in k])"))
    assert result.stdout == "[]\n"


def test_a_program_that_said_it_finished_is_believed_whatever_happens_then(
    launch: Launch, script: Script
) -> None:
    text = """
import os, sys
sys.modules["_paceline_program"].leave_process_group = os.abort
"""
    result = launch(script(text))
    assert result.returncode == 0, result.stderr
    # The same end before that is told.
    result = launch(script("import os; os.abort()"))
    assert result.returncode == 128 + 6
    assert "Rank 0 was ended by SIGABRT" in result.stderr


def test_a_program_that_has_finished_ends_while_its_group_holds_the_interpreter(
    launch: Launch, script: Script
) -> None:
    text = """
import ctypes, sys, types
program = sys.modules["_paceline_program"]
program._LEAVE_TIMEOUT_S = 0.5
# What is called so keeps the interpreter's lock.
stuck = lambda: ctypes.PyDLL(None).sleep(100)
sys.modules["torch.distributed"] = types.SimpleNamespace(
    is_available=lambda: True, is_initialized=lambda: True, destroy_process_group=stuck
)
"""
    result = launch("--heartbeat-timeout-s=60", script(text))
    assert result.returncode == 0, result.stderr


def test_a_crash_shows_the_stack_of_the_program(launch: Launch, script: Script) -> None:
    text = "import ctypes\ndef crash(): ctypes.string_at(0)\ncrash()\n"
    result = launch(script(text))
    assert result.returncode == 128 + 11
    assert "Segmentation fault" in result.stderr
    assert "line 2 in crash" in result.stderr


def test_spawned_processes_find_the_program(launch: Launch, script: Script) -> None:
    text = """
import multiprocessing
def double(value): return 2 * value
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""
    result = launch(script(text))
    assert (result.returncode, result.stdout) == (0, "[2, 4]\n"), result.stderr


def test_the_wrapper_and_core_name_the_same_variable() -> None:
    assert _worker_program.CHANNEL_VARIABLE == _attempt_journal._CHANNEL_VARIABLE
    assert launch_package.__all__ == []
