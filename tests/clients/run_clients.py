"""Earlier releases of other trackers' clients against a master, and their own tests.

    python tests/clients/run_clients.py wandb
    WANDB_SRC=CHECKOUT python tests/clients/run_clients.py wandb

    WANDB_SRC=CHECKOUT python tests/clients/run_clients.py wandb-list [FOLDER ...]

Each release has an environment of its own in `build/clients`. With a checkout of W&B's client, its
system tests that are listed in `wandb_system_tests.txt` as passing must pass; `wandb-list` runs all
of some folders, and writes that list anew: a name and `pass` or a reason in each line.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / "build" / "clients"
WANDB_RELEASES = ("0.31.0", "0.30.0", "0.29.0", "0.28.2", "0.27.2", "0.26.1")
# The release to which the checkout's tests belong, and what they import.
WANDB_SUITE = ("wandb==0.28.2", "-r", "requirements/requirements_test.txt", "click<8.4", "filelock")
WANDB_SUITE += ("cloudpickle", "Pillow", "polars", "matplotlib", "soundfile", "plotly", "bokeh")
WANDB_SUITE += ("tqdm", "tenacity", "ipython", "pyarrow")
WANDB_FOLDERS = tuple(
    f"tests/system_tests/test_{name}" for name in ("core", "api", "artifacts", "plot.py")
)
WANDB_LIST = HERE / "wandb_system_tests.txt"
_PORTS = "WANDB_SERVICE_PORTS"


def environment(name: str, *packages: str, cwd: Path = HERE) -> Path:
    """Return the interpreter of an environment with packages, made at its first use."""
    directory = ENVIRONMENTS / name
    python = directory / "bin" / "python"
    if not (directory / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, cwd=cwd)
        (directory / "done").touch()
    return python


@contextmanager
def wandb_service() -> Iterator[dict[str, int]]:
    """Serve a master with the service that makes users; yield their ports."""
    command = [sys.executable, HERE / "wandb_service.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


def clean_variables(ports: dict[str, int], home: str) -> dict[str, str]:
    """Return the environment for a client, without settings of whoever runs this."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    kept.pop("PYTHONPATH", None)
    return kept | {"HOME": home, "WANDB_ERROR_REPORTING": "false", _PORTS: json.dumps(ports)}


def try_wandb_releases() -> bool:
    """Run `wandb_script.py` with each release, and print what works."""
    is_good = True
    key = "wandb_client_" + 40 * "0"
    with wandb_service() as ports, tempfile.TemporaryDirectory() as home:
        url = f"http://127.0.0.1:{ports['fixture_port']}/db/user"
        user = json.dumps({"command": "up", "username": key})
        subprocess.run(["curl", "-sf", "-d", user, url], check=True)
        told = {"WANDB_API_KEY": key, "WANDB_SILENT": "true"}
        told["WANDB_BASE_URL"] = f"http://127.0.0.1:{ports['base_port']}"
        for release in WANDB_RELEASES:
            python = environment(f"wandb-{release}", f"wandb=={release}", "numpy", "pillow")
            folder = Path(home, release)
            folder.mkdir()
            result = subprocess.run(
                [python, HERE / "wandb_script.py"], cwd=folder, text=True, capture_output=True,
                env=clean_variables(ports, home) | told,
            )  # fmt: skip
            works = [line.split()[0] for line in result.stdout.splitlines() if "works" in line]
            verdict = "works" if result.returncode == 0 else "FAILS"
            print(f"wandb {release}: {verdict} ({', '.join(works)})", flush=True)
            if result.returncode != 0:
                is_good = False
                print(result.stderr[-3000:])
    return is_good


def run_wandb_suite(checkout: Path, names: list[str], report: Path) -> int:
    """Run some of W&B's own tests, and return the exit code; `report` becomes JUnit's XML."""
    python = environment("wandb-suite", *WANDB_SUITE, cwd=checkout)
    with wandb_service() as ports, tempfile.TemporaryDirectory() as home:
        source = Path(home, "source")
        for part in ("tests", "tools"):
            shutil.copytree(checkout / part, source / part)
        shutil.copy(checkout / "pyproject.toml", source)
        # The tests ask this for the ports of a server.
        script = f"import os\nprint(os.environ[{_PORTS!r}])\n"
        (source / "tools" / "local_wandb_server.py").write_text(script)
        told = clean_variables(ports, home)
        told["PATH"] = f"{python.parent}:{told['PATH']}"
        command = [python, "-m", "pytest", "-q", "-n", "2", "-o", "addopts=", "--timeout", "120"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
        return subprocess.run([*command, *names], cwd=source, env=told).returncode


def try_wandb_suite(checkout: Path) -> bool:
    """Run W&B's own tests that are listed as passing."""
    rows = [line.split(maxsplit=1) for line in WANDB_LIST.read_text().splitlines()]
    names = [row[0] for row in rows if len(row) == 2 and row[1] == "pass"]
    with tempfile.TemporaryDirectory() as folder:
        code = run_wandb_suite(checkout, names, Path(folder, "report.xml"))
    print(f"{len(names)} of W&B's system tests must pass: exit code {code}")
    return code == 0


def renew_wandb_list(checkout: Path, folders: list[str]) -> None:
    """Run the tests of some folders, and write the list of their names and results."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        run_wandb_suite(checkout, folders or list(WANDB_FOLDERS), report)
        rows = {}
        for case in ElementTree.parse(report).iter("testcase"):
            file = case.get("file", "")
            module = file.removesuffix(".py").replace("/", ".")
            classes = case.get("classname", "").removeprefix(module).split(".")
            name = "::".join([file, *filter(None, classes), case.get("name", "")])
            if not any(letter.isspace() for letter in name):
                found = [each for each in case if each.tag in ("failure", "error", "skipped")]
                words = (found[0].get("message") or found[0].tag).split() if found else ["pass"]
                rows[name] = " ".join(words)[:150]
    WANDB_LIST.write_text("".join(f"{name} {rows[name]}\n" for name in sorted(rows)))


def main() -> int:
    """Try the clients that the command line names; return the exit code."""
    is_good = True
    if sys.argv[1:2] == ["wandb-list"]:
        renew_wandb_list(Path(os.environ["WANDB_SRC"]), sys.argv[2:])
    if "wandb" in sys.argv[1:]:
        is_good &= try_wandb_releases()
        if os.environ.get("WANDB_SRC"):
            is_good &= try_wandb_suite(Path(os.environ["WANDB_SRC"]))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
