"""A fork of a template is the same as a new interpreter: many looks at both."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.template_client import Template, TemplateError
from paceline._training.workers.processes.worker_process import WorkerSpec, start_process
from paceline._training.workers.processes.worker_program import PROGRAM_FILE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are templates on Linux only")

PROBES = Path(__file__).with_name("warm_probes.py")
MODULES = ["torch", "numpy", "torch._dynamo", "multiprocessing", "asyncio", "ssl", "logging"]
TOKEN = "token-of-another-experiment"


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE", "OMP_", "KMP_"))}
    return kept | {"OMP_NUM_THREADS": "2", "MARKER": "ä b", "TZ": "Asia/Tokyo"} | more


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    made = Template(
        {},
        [sys.executable],
        environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TZ="UTC"),
        None,
        modules=MODULES,
        later=(),
        idle_s=None,
        parent="owner",
    )
    made.await_loaded()
    yield made
    made.close()


def run(start: Any, words: list[str], directory: Path, rank: int, **more: str) -> list[str]:
    lines: list[str] = []
    spec = WorkerSpec(
        command=words,
        environment=environment(RANK=str(rank), LOCAL_RANK=str(rank), **more),
        working_directory=directory,
    )
    group = LocalGroup([spec], lambda line: lines.append(line.text), adopt_strays=True, start=start)
    group.start()
    exits = group.wait(300)
    assert exits is not None
    assert [exit_.code for exit_ in exits] == [0], lines
    return lines


def forked(template: Template) -> Callable[..., Any]:
    return lambda *arguments: template.start((), *arguments)


@pytest.fixture(scope="module", params=[("launcher", 0), ("trial", 2)])
def seen(
    request: pytest.FixtureRequest, template: Template, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Return what two forks and a new interpreter see."""
    kind, rank = request.param
    directory = tmp_path_factory.mktemp("warm")
    script = directory / "probes.py"
    script.write_text(PROBES.read_text())
    own = [sys.executable, PROGRAM_FILE, "script"] if kind == "launcher" else [sys.executable]
    answers = []
    before = os.umask(0o27)
    try:
        for name, start in (
            ("a", forked(template)),
            ("b", forked(template)),
            ("c", start_process),
        ):
            output = directory / name
            run(start, [*own, "probes.py", str(output), "--flag"], directory, rank)
            answer = json.loads(output.read_text())
            answer["same"]["exit handlers"] = Path(f"{output}.exit").read_text().split()
            # The launcher's wrapper has always left without the end of the interpreter.
            written = [Path(f"{output}.{of}").read_text() for of in ("open", "kept")]
            answer["same"]["end"] = written == ["written"] * 2 or kind == "launcher"
            answers.append(answer)
    finally:
        os.umask(before)
    return answers


@pytest.mark.long
def test_a_fork_sees_what_a_new_interpreter_sees(seen: list[dict[str, Any]]) -> None:
    first, second, fresh = (answer["same"] for answer in seen)
    assert len(fresh) >= 55
    different = {name: (first[name], fresh[name]) for name in fresh if first[name] != fresh[name]}
    assert different == {}
    assert first == second
    # The launcher's wrapper ends without taking the program's objects apart.
    assert fresh["exit handlers"][:2] == ["last", "first"]
    assert fresh["end"]


def test_what_is_drawn_at_random_differs_between_forks(seen: list[dict[str, Any]]) -> None:
    for name in seen[0]["own"]:
        assert len({answer["own"][name] for answer in seen}) == 3, name


ENDING = """
import os, sys, threading, time, torch
class Mourned:
    def __del__(self, mkdir=os.mkdir, path=sys.argv[1]):
        mkdir(path)
torch.mourned = Mourned()
if sys.argv[2] == "thread":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
if sys.argv[2] == "group":
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
"""


@pytest.mark.parametrize(
    ("kept", "is_taken_apart"), [("", False), ("thread", True), ("group", True)]
)
def test_libraries_are_taken_apart_where_they_may_hold_what_runs(
    template: Template, tmp_path: Path, kept: str, is_taken_apart: bool
) -> None:
    """A thread or a process group ends as in a new interpreter; without both, forks end at once."""
    (tmp_path / "ending.py").write_text(ENDING)
    output = tmp_path / "deleted"
    run(forked(template), [sys.executable, "ending.py", str(output), kept], tmp_path, 0)
    assert output.exists() == is_taken_apart


@pytest.mark.long
def test_a_template_holds_nothing_of_a_program(template: Template, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print(os.environ['SECRET'])")
    lines = run(forked(template), [sys.executable, "train.py", TOKEN], tmp_path, 0, SECRET=TOKEN)
    assert lines == [TOKEN]
    assert TOKEN.encode() not in memory_of(template._popen.pid)
    # The search finds what there is.
    assert b"_get_candidate_names" in memory_of(template._popen.pid)


def memory_of(pid: int) -> bytes:
    found = [Path(f"/proc/{pid}/environ").read_bytes()]
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            words = line.split()
            if not words[1].startswith("rw") or words[-1] in ("[vvar]", "[vsyscall]"):
                continue
            start, end = (int(word, 16) for word in words[0].split("-"))
            memory.seek(start)
            try:
                found.append(memory.read(end - start))
            except OSError:
                continue
    return b"".join(found)


def test_a_program_with_a_module_that_is_loaded_under_its_name_starts_afresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train.py").write_text("import typing_extensions; print(typing_extensions.MINE)")
    (tmp_path / "typing_extensions.py").write_text("MINE = 'mine'")
    words = [sys.executable, "train.py"]
    made = small_template(["typing_extensions"])
    assert run(forked(made), words, tmp_path, 0) == ["mine"]
    made.close()
    assert "has a module 'typing_extensions' too" in caplog.text


def test_a_program_starts_afresh_once_a_loaded_file_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "installed.py").write_text("VERSION = 1")
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("import installed; print(installed.VERSION)")
    path = {"PYTHONPATH": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
    made = small_template(["installed"], **path)
    try:
        words = [sys.executable, "train.py"]
        assert run(forked(made), words, work, 0, **path) == ["1"]
        assert caplog.text == ""
        (library / "new").write_text("VERSION = 22")
        os.replace(library / "new", library / "installed.py")
        assert run(forked(made), words, work, 0, **path) == ["22"]
        assert "has changed since it was loaded" in caplog.text
    finally:
        made.close()


def small_template(modules: list[str], **more: str) -> Template:
    made = Template(
        {}, [sys.executable], environment(**more), None,
        modules=modules, later=(), idle_s=None, parent="owner",
    )  # fmt: skip
    made.await_loaded()
    return made


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_program_starts_afresh_without_a_template_that_answers(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    monkeypatch.setattr("paceline._training.workers.processes.template_client._ANSWER_S", 1.0)
    (tmp_path / "train.py").write_text("print('trained')")
    made = small_template([])
    os.kill(made._popen.pid, getattr(signal, fault))
    assert run(forked(made), [sys.executable, "train.py"], tmp_path, 0) == ["trained"]
    assert caplog.text.count("as a new interpreter") == 1
    made.close()


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "changed"])
def test_a_fault_before_one_of_three_ranks_starts_it_afresh_with_the_reason(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    rank: int,
) -> None:
    monkeypatch.setattr("paceline._training.workers.processes.template_client._ANSWER_S", 3.0)
    library = tmp_path / "library"
    library.mkdir()
    (library / "installed.py").write_text("VERSION = 1")
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text(
        "import os, sys, installed\n"
        "name = 'paceline._training.workers.processes.template_process'\n"
        "how = 'fork' if name in sys.modules else os.environ['PACELINE_FRESH_START']\n"
        "print(os.environ['RANK'], installed.VERSION, how)"
    )
    more = {"PYTHONPATH": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
    made = small_template(["installed"], **more)

    def start(spec: WorkerSpec, variables: Any, is_read: bool) -> Any:
        if spec.rank != rank:
            return made.start((), spec, variables, is_read)
        if fault == "changed":
            (library / "new").write_text("VERSION = 22")
            os.replace(library / "new", library / "installed.py")
        else:
            os.kill(made._popen.pid, getattr(signal, fault))
        return made.start((), spec, variables, is_read)

    lines: list[str] = []
    specs = [
        WorkerSpec(
            command=[sys.executable, "train.py"],
            environment=environment(RANK=str(each), **more),
            working_directory=work,
            rank=each,
            world_size=3,
        )
        for each in range(3)
    ]
    group = LocalGroup(specs, lambda line: lines.append(line.text), adopt_strays=True, start=start)
    group.start()
    exits = group.wait(300)
    made.close()
    assert [exit_.code for exit_ in exits or ()] == [0, 0, 0], lines
    by_rank = {int(line.split()[0]): line.split(maxsplit=2)[1:] for line in lines}
    assert all(by_rank[each] == ["1", "fork"] for each in range(rank))
    reason = {"changed": "has changed since it was loaded", "SIGSTOP": "is silent for 3 s"}
    for each in range(rank, 3):
        version, how = by_rank[each]
        assert version == ("22" if fault == "changed" else "1")
        assert how != "fork"
    assert reason.get(fault, "the template has ended") in by_rank[rank][1]
    assert reason.get(fault, "the template has ended") in caplog.text


def test_a_module_that_starts_threads_makes_no_template(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    with pytest.raises(TemplateError, match="has 2 threads"):
        small_template(["busy"], PYTHONPATH=str(tmp_path))


def test_a_fork_outlives_its_template_but_not_its_owner(
    tmp_path: Path, wait_until: Callable[[Callable[[], object]], None]
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nopen('part', 'w').write(str(os.getpid()))\nos.rename('part', 'pid')\n"
        "time.sleep(600)"
    )
    (tmp_path / "owner.py").write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "import test_warm_probes as t\n"
        "from paceline._training.workers.processes import leftover_processes as s\n"
        "made = t.small_template([])\n"
        "with s.adopting_orphan_processes():\n"
        "    spec = t.WorkerSpec(command=[sys.executable, 'train.py'],\n"
        "                        environment=t.environment(), working_directory=Path.cwd())\n"
        "    made.start((), spec, t.environment(), False)\n"
        "    print(made._popen.pid, flush=True)\n"
        "    made.close()\n"
        "    print('closed', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "owner.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        template = int(owner.stdout.readline())
        wait_until((tmp_path / "pid").exists)
        pid = int((tmp_path / "pid").read_text())
        assert owner.stdout.readline() == "closed\n"
        assert not Path(f"/proc/{template}").exists()
        assert Path(f"/proc/{pid}").exists()
        owner.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
