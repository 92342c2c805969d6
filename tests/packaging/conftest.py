"""A copy of the source, a front end that builds it, and environments to install it into."""

import os
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What git ignores.
_LEFT_OUT = [".git", ".venv*", "node_modules", "__pycache__", ".*_cache", "paceline_runs", "dist"]
_NODE = ("node", "nodejs", "npm", "npx", "corepack", "yarn", "pnpm")
# The steps of PEP 517 that a front end takes, each in a process of its own.
_STEP = """
import json, os, sys
import hatchling.build as backend

name, source, *arguments = sys.argv[1:]
os.chdir(source)
result = getattr(backend, name)(*arguments)
print(json.dumps(result))
"""

Output = "subprocess.CompletedProcess[str]"


def run(command: list[str | Path], **variables: str) -> Output:
    """Run a command without the settings of this project, and return what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "npm_"))}
    return subprocess.run(
        [str(part) for part in command],
        env=kept | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, and the programs that are on its path."""

    python: Path
    path: str

    def run(self, *command: str | Path, **variables: str) -> Output:
        """Run a command and return it; it must succeed."""
        result = run(list(command), PATH=self.path, **variables)
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    def install(self, *arguments: str | Path, **variables: str) -> None:
        """Install packages into the environment."""
        pip = (sys.executable, "-m", "pip", "--python", self.python)
        self.run(*pip, "install", "--quiet", *arguments, **variables)

    def step(self, name: str, source: Path, *arguments: Path, **variables: str) -> tuple[str, str]:
        """Take one step of a build, and return its result as JSON and what it said."""
        result = self.run(self.python, "-c", _STEP, name, source, *arguments, **variables)
        return result.stdout.splitlines()[-1], result.stdout + result.stderr


@pytest.fixture(scope="session")
def path_without_node(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PATH with all programs but Node's."""
    programs = tmp_path_factory.mktemp("bin")
    for folder in os.get_exec_path():
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            link = programs / program.name
            if program.name not in _NODE and not link.is_symlink():
                link.symlink_to(program)
    assert not any(shutil.which(name, path=str(programs)) for name in _NODE)
    return str(programs)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a copy of the source in which nothing is built."""
    copy = tmp_path / "source"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    shutil.rmtree(copy / "src/paceline/_cluster/master/webui", ignore_errors=True)
    return copy


@pytest.fixture
def built_source(source: Path) -> Path:
    """Return a copy of the source with the web UI that `make ui` built."""
    check = [sys.executable, str(ROOT / "webui/scripts/build.py"), "--check"]
    if subprocess.run(check, check=False).returncode != 0:
        pytest.skip("NOT TESTED: the web UI is not built from this source. Hint: make ui")
    web_ui = Path("src/paceline/_cluster/master/webui")
    shutil.copytree(ROOT / web_ui, source / web_ui)
    return source


def _make_environment(folder: Path, path: str) -> Environment:
    command = [sys.executable, "-m", "venv", "--without-pip", folder]
    subprocess.run(command, check=True, timeout=1000)
    return Environment(folder / "bin" / "python", f"{folder / 'bin'}:{path}")


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory, path_without_node: str) -> Environment:
    """Return an environment with the build back end, as front ends make one, without Node."""
    environment = _make_environment(tmp_path_factory.mktemp("builder"), path_without_node)
    try:
        environment.install("hatchling>=1.27", "editables")
    except AssertionError as error:
        pytest.skip(f"NOT TESTED: building needs hatchling from a package index: {error}")
    return environment


@pytest.fixture
def user(tmp_path: Path, path_without_node: str) -> Environment:
    """Return an environment with the packages that Paceline needs, but without Paceline."""
    environment = _make_environment(tmp_path / "user", path_without_node)
    [packages] = (environment.python.parents[1] / "lib").glob("python*/site-packages")
    # Files .pth there are not followed, so an editable Paceline of these tests stays out.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return environment
