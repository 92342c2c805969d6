"""MLflow's clients against Paceline: a matrix of releases, and MLflow's own tests.

    python tests/clients/run_mlflow.py                     every release below
    MLFLOW_SRC=DIR python tests/clients/run_mlflow.py      and the listed tests of a checkout

Environments are made below `CLIENT_ENVS`, or a temporary directory, and used again from there.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
RELEASES = ("3.17.2", "3.16.1", "3.14.0", "3.9.0", "3.4.0", "2.22.5")
NEEDS = ("pandas", "pillow", "matplotlib", "psutil")
SUITE = [
    f"tests/tracking/test_{name}.py"
    for name in ("rest_tracking", "tracking", "client", "log_figure", "log_image",
                 "artifact_utils", "model_registry")
]  # fmt: skip
LIST = HERE / "mlflow_tests.txt"
_MOST_MASTERS = 4


def main() -> int:
    """Run what the environment asks for; return the number of failures."""
    envs = os.environ.get("CLIENT_ENVS")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(envs or scratch)
        failures = sum(not _try_release(root, release) for release in RELEASES)
        source = os.environ.get("MLFLOW_SRC")
        if source:
            failures += _run_suite(root, Path(source), Path(scratch))
    return failures


def serve() -> None:
    """Serve a new master for each line that comes in, and print its URL with its token."""
    sys.path.insert(0, str(HERE.parent / "master"))
    from conftest import ServedMaster

    masters: list[ServedMaster] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, _ in enumerate(sys.stdin):
            masters.append(ServedMaster(Path(scratch) / str(number), 1))
            newest = masters[-1]
            print(f"http://api:{newest.home.token}@127.0.0.1:{newest.port}", flush=True)
            if len(masters) > _MOST_MASTERS:
                masters.pop(0).close()
        for master in masters:
            master.close()


def _try_release(root: Path, release: str) -> bool:
    python = _environment(root / f"mlflow-{release}", [f"mlflow-skinny=={release}", *NEEDS])
    with _master() as url:
        run = subprocess.run(
            [python, str(HERE / "mlflow_script.py"), url], capture_output=True, text=True
        )
    print(f"mlflow {release}: {'works' if run.returncode == 0 else 'FAILS'}", flush=True)
    if run.returncode != 0:
        print(run.stderr)
    return run.returncode == 0


def _run_suite(root: Path, source: Path, scratch: Path) -> int:
    version = re.search(r'^VERSION = "([\d.]+?)(?:\.dev0)?"', _version_text(source), re.MULTILINE)
    assert version is not None
    release = os.environ.get("MLFLOW_RELEASE", version[1])
    python = _environment(
        root / f"suite-{release}",
        [f"mlflow=={release}", *NEEDS, "plotly", "pytest", "pytest-asyncio", "pytest-timeout"],
    )
    report = Path(os.environ.get("SUITE_REPORT", scratch / "report.xml"))
    subprocess.run(
        [python, "-m", "pytest", "-p", "mlflow_suite", "-q", "--timeout=300", "--tb=short",
         "-p", "no:cacheprovider", f"--junitxml={report}", *SUITE],
        cwd=source,
        env=os.environ | {"PYTHONPATH": str(HERE), "PACELINE_PYTHON": sys.executable,
                          "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"},
    )  # fmt: skip
    found = dict(_outcomes(report))
    expected = dict(listed())
    lost = [name for name, outcome in expected.items()
            if outcome == "pass" and found.get(name) != "pass"]  # fmt: skip
    for name in lost:
        print(f"must pass, but does not: {name}: {found.get(name, 'missing')}")
    passed = sum(outcome == "pass" for outcome in found.values())
    print(f"MLflow's own tests: {passed} of {len(found)} pass, {len(lost)} of the list do not.")
    return len(lost)


def _version_text(source: Path) -> str:
    path = source / "mlflow" / "version.py"
    return path.read_text() if path.exists() else f'VERSION = "{RELEASES[0]}"'


def _outcomes(report: Path) -> Iterator[tuple[str, str]]:
    """Yield each test's name and `pass` or how it ended else, from pytest's report in XML."""
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        ends = [end for end in ("failure", "error", "skipped") if case.find(end) is not None]
        yield f"{module}.py::{case.get('name')}", ends[0] if ends else "pass"


def listed() -> Iterator[tuple[str, str]]:
    """Yield the name of each of MLflow's tests that concern us, and `pass` or why it does not."""
    for line in LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, outcome = line.rpartition(" | ")
            yield name, outcome


def _environment(path: Path, packages: list[str]) -> str:
    """Make an environment unless it is there; return its interpreter."""
    python = path / "bin" / "python"
    if not (path / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
        (path / "ready").touch()
    return str(python)


@contextmanager
def _master() -> Iterator[str]:
    program = [sys.executable, __file__, "serve"]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write("new\n")
        server.stdin.flush()
        yield server.stdout.readline().strip()
        server.stdin.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        sys.exit(main())
