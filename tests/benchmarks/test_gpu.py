"""The command that proves on a GPU what Paceline promises, rehearsed on the CPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
# Many processes start, beside other tests.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def modules_of_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def command(results: Path, *arguments: str) -> list[str]:
    script = str(BENCHMARKS / "gpu.py")
    return [sys.executable, script, "--device", "cpu", "--results", str(results), *arguments]


def stored_in(results: Path) -> Any:
    (path,) = results.glob("*.json")
    return json.loads(path.read_text())


def rows_of(stored: Any) -> dict[str, list[Any]]:
    return {part["name"]: part["rows"] for part in stored["parts"]}


# All but the tests, which are tests here; four runs take turns with other tests better than one.
REHEARSED = [
    {
        "facts": ["copy, host to host"],
        "waits": ["paceline, fp16: host synchronisations"],
    },
    {
        "saves": ["stall, second save on", "until it is on the disk"],
        "large": ["stall, second save on", "until it is on the disk"],
    },
    {
        "steps": [
            "null, eager",
            "transformer, small, eager",
            "transformer, small, compiled",
            "calls in a step, by the profiler",
        ],
    },
    {"steps-of-all": ["null, eager", "calls in a step, by the profiler"]},
    {
        "recovery": ["SIGKILL to the next step, 10 MB"],
        "reduction": ["two ranks, flat", "two ranks, overlapped"],
        "saves10": ["a checkpoint of 40 MB: stall"],
        "recovery10": ["SIGKILL to the next step, 20 MB"],
    },
    {
        "fsdp": ["bf16, compiled: a resumed training", "fp32: the loss", "a step of FSDP2"],
    },
]


@pytest.mark.long
@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(wanted, marks=[] if "facts" in wanted else pytest.mark.slow)
        for wanted in REHEARSED
    ],
    ids="-".join,
)
def test_every_part_runs_on_the_cpu_and_tells_what_it_leaves_out(
    wanted: dict[str, list[str]], tmp_path: Path
) -> None:
    """By the script that a machine with a GPU runs."""
    done = subprocess.run(
        ["sh", str(BENCHMARKS / "gpu.sh"), *command(tmp_path / "results", *wanted)[2:]],
        env=os.environ | {"PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stored = stored_in(tmp_path / "results")
    rows = rows_of(stored)
    assert stored["is_complete"]
    assert list(rows) == list(wanted)
    wrong = [row for found in rows.values() for row in found if row["status"] == "**no**"]
    assert wrong == []
    for part, whats in wanted.items():
        told = [row["what"] for row in rows[part]]
        assert [what for what in whats if not any(what in one for one in told)] == []
    if "facts" in wanted:
        left_out = [row["what"] for row in rows["facts"] if row["status"] == "NOT RUN"]
        assert left_out == ["the GPU"]
    # What was printed as it came is what is stored.
    (table,) = (tmp_path / "results").glob("*.md")
    lines = [line for line in table.read_text().splitlines() if line.startswith("|")]
    assert [line for line in done.stdout.splitlines() if line.startswith("|")] == lines
    assert len(lines) == 2 + sum(map(len, rows.values()))


def test_every_part_is_rehearsed() -> None:
    from gpu_parts import PARTS

    rehearsed = {part for wanted in REHEARSED for part in wanted}
    assert rehearsed | {"tests"} == {part.name for part in PARTS}


@pytest.mark.slow
def test_the_tests_are_a_part(tmp_path: Path) -> None:
    from gpu_record import Status, rows_in

    rows_path = tmp_path / "rows"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_tests.py"), "--device", "cpu", "-k", "generators"],
        env=os.environ | {"PACELINE_GPU_ROWS": str(rows_path), "PYTHONPATH": str(BENCHMARKS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = {row.what: (row.status, row.why) for row in rows_in(rows_path)}
    assert told["the generators of the device are put back"] == (Status.MET, "")
    assert told["the generators of all devices are put back"][0] is Status.NOT_RUN


SLOW_PART = """
import os, subprocess, sys, time
from gpu_record import tell
tell("begun")
# An orphan in a session of its own.
code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', " \\
    "'import time; time.sleep(600)', sys.argv[1]], start_new_session=True)"
subprocess.run([sys.executable, "-c", code, os.environ["MARK"]], check=True)
tell("waiting")
if "FAILS" in os.environ:
    raise ValueError("no such thing")
time.sleep(600)
"""


@pytest.fixture
def parts(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a command of other parts: one, and the facts."""

    def make(body: str) -> Path:
        folder = tmp_path / "benchmarks"
        shutil.copytree(BENCHMARKS, folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
        (folder / "gpu_slow.py").write_text(body)
        text = (folder / "gpu_parts.py").read_text()
        made = (
            'Part(name="slow", what="a slow one", script=("gpu_slow.py",), limit_s=4.0, needs=())'
        )
        (folder / "gpu_parts.py").write_text(f"{text}\n\nPARTS = ({made}, PARTS[0])\n")
        return folder / "gpu.py"

    return make


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
def test_a_part_that_hangs_or_fails_costs_the_others_nothing(
    fails: bool, parts: Callable[[str], Path], tmp_path: Path
) -> None:
    script, results = parts(SLOW_PART), tmp_path / "results"
    mark = f"mark-{tmp_path}"
    done = subprocess.run(
        [sys.executable, str(script), *command(results)[2:]],
        env=os.environ | {"MARK": mark} | ({"FAILS": "1"} if fails else {}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert marked(mark) == []
    stored = stored_in(results)
    rows = rows_of(stored)
    assert [row["what"] for row in rows["slow"]] == ["begun", "waiting", "a slow one"]
    last = rows["slow"][-1]
    assert last["status"] == "**no**"
    assert ("no such thing" if fails else "it took more than 12 s") in last["why"]
    assert ("ValueError: no such thing" in done.stdout) == fails
    assert len(rows["facts"]) > 3
    assert stored["is_complete"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_is_known_is_stored_when_the_command_is_cut_off(
    number: signal.Signals, parts: Callable[[str], Path], tmp_path: Path
) -> None:
    script, results = parts(SLOW_PART), tmp_path / "results"
    mark = f"mark-{tmp_path}"
    process = subprocess.Popen(
        [sys.executable, str(script), *command(results)[2:]],
        env=os.environ | {"MARK": mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "waiting" in line:
            break
    slow = [
        one for one in psutil.Process(process.pid).children() if "gpu_slow" in str(one.cmdline())
    ]
    process.send_signal(number)
    rest = process.stdout.read()
    process.stdout.close()
    if number == signal.SIGTERM:
        assert process.wait(60) == 1
        assert "interrupted" in rest
    else:
        assert process.wait(60) == -number
        # Nothing is left to end what the part has started itself.
        for one in (orphans := marked(mark)):
            one.kill()
        psutil.wait_procs(orphans, timeout=60)
    assert len(slow) == 1
    psutil.wait_procs(slow, timeout=60)
    assert [one for one in slow if one.is_running() and one.status() != "zombie"] == []
    assert marked(mark) == []
    stored = stored_in(results)
    assert not stored["is_complete"]
    assert [row["what"] for row in rows_of(stored)["slow"]] == ["begun", "waiting"]
    (table,) = results.glob("*.md")
    assert "has not come to its end" in table.read_text()
    assert [path.suffix for path in sorted(results.iterdir())] == [".json", ".md"]


def test_a_line_that_was_cut_off_is_no_row(tmp_path: Path, monkeypatch: Any) -> None:
    from gpu_record import check, rows_in, tell

    path = tmp_path / "rows"
    monkeypatch.setenv("PACELINE_GPU_ROWS", str(path))
    tell("one", "1 | 2", why="in\nlines")
    check("two", False, bar="<= 2")
    whole = rows_in(path)
    with path.open("ab") as file:
        file.write(b'{"what": "thr')
    assert rows_in(path) == whole
    assert [row.line("part") for row in whole] == [
        "| part | one | 1 \\| 2 |  | - | in lines |",
        "| part | two |  | <= 2 | **no** |  |",
    ]


def test_parts_fit_into_the_time() -> None:
    from gpu_parts import PARTS, TOTAL_S

    *others, last = (part for part in PARTS if not part.is_extra)
    assert sum(part.limit_s for part in others) + last.least_s <= TOTAL_S < 540
    assert [part.name for part in others if not (BENCHMARKS / part.script[0]).exists()] == []


def test_gpus_are_read_from_the_lines_of_nvidia_smi() -> None:
    from gpu_machine import parsed_gpus

    text = (
        "0, GPU-aaaa-1, NVIDIA H200, 143771, 4, 580.159.04\n"
        "1, GPU-bbbb-2, NVIDIA A30, [N/A], [Insufficient Permissions], 580.159.04\n"
        "Warning: something else\n\n"
    )
    first, second = parsed_gpus(text)
    assert (first.index, first.uuid, first.name) == ("0", "GPU-aaaa-1", "NVIDIA H200")
    assert (first.total_mib, first.used_mib, first.driver) == (143771, 4, "580.159.04")
    assert second.total_mib != second.total_mib
    assert parsed_gpus("No devices were found\n") == []


def test_waits_are_told_by_their_lines() -> None:
    """torch warns of each; what else is warned of meanwhile is no wait."""
    from gpu_waits import Waits

    waits = Waits()
    with waits.watching(is_cuda=False):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered ...)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert waits.number == 3
    (place,) = waits.places
    assert "tests/benchmarks/test_gpu.py:" in place
    assert 'warnings.warn("called' in place
    assert waits.told().endswith("(3 times)")
    with pytest.warns(UserWarning, match="after it"):
        warnings.warn("after it", stacklevel=1)


def wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.long
@pytest.mark.parametrize("has_pip", [True, False])
def test_what_is_missing_is_taken_from_wheels_and_the_rest_is_named(
    has_pip: bool, tmp_path: Path
) -> None:
    """The interpreter's own packages stay: what is there, and what that requires."""
    root, site = tmp_path / "root", tmp_path / "root" / "build" / "gpu-site"
    (root / "benchmarks").mkdir(parents=True)
    shutil.copy(BENCHMARKS / "gpu_install.py", root / "benchmarks")
    (root / "pyproject.toml").write_text(
        '[project]\nname = "paceline"\nversion = "3.2.1"\ndependencies = [\n'
        '  "absent_one>=1.0",\n  "absent_two",\n  "numpy>=1.0",\n  "torch>=2.6",\n]\n'
    )
    wheel(root / "wheels", "absent_one", "1.5", "Requires-Dist: absent-part (>=1)\n")
    wheel(root / "wheels", "absent_part", "1.1", 'Requires-Dist: never ; extra == "more"\n')
    wheel(root / "wheels", "numpy", "99.0")
    wheel(root / "wheels", "torch", "99.0")
    if not has_pip:
        # Its module is there and fails, as one that is missing does.
        (tmp_path / "no_pip").mkdir()
        (tmp_path / "no_pip" / "pip.py").write_text("raise ImportError\n")
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "gpu_install.py")],
        env=os.environ | ({} if has_pip else {"PYTHONPATH": str(tmp_path / "no_pip")}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    paths = done.stdout.strip().split(os.pathsep)
    assert paths[:2] == [str(site), str(root / "src")]
    assert {path.name for path in site.glob("*.py")} == {"absent_one.py", "absent_part.py"}
    assert (site / "paceline-3.2.1.dist-info" / "METADATA").exists()
    assert "missing, so that some parts are left out: absent_two." in done.stderr
    assert ("unpacked without it" in done.stderr) == (not has_pip)


def test_an_interpreter_without_torch_is_refused(tmp_path: Path) -> None:
    """It fails to import it, as it would without."""
    (tmp_path / "torch.py").write_text("raise ImportError\n")
    done = subprocess.run(
        ["sh", str(BENCHMARKS / "gpu.sh")],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "must have torch, but cannot import it. Hint: PYTHON=" in done.stderr
