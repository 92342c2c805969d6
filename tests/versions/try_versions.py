"""Try the bounds of pyproject.toml: the lowest and the newest versions, on each Python.

`python tests/versions/try_versions.py` makes an environment in `build/versions` for each of them,
takes the first steps of a user in it, runs tests, and prints a table. It ends with 1 if something
failed. A Python that has a torch of its own, as Debian's may, is tried with that one.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "versions"
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
EXTRAS = ("azure", "data", "kubernetes", "mlflow", "plot", "ray", "tensorboard", "wandb")
# What the tests below need of the extra `dev`.
TOOLS = re.compile(
    r'^ *"((?:flask|hypothesis|jsonschema|moto|pytest|schemathesis)\b.*)",$', re.MULTILINE
)
# The version of torch to take where the wanted one is built for CUDA only, see the lock.
LOCKED_TORCH = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
WITHOUT_TORCH = (
    *("tests/messages", "tests/config", "tests/search", "tests/client", "tests/master/store"),
    *("tests/cli/test_surface.py", "tests/cli/test_states.py"),
    # The lock's pydantic wrote it.
    "--deselect=tests/config/test_schema.py::test_the_published_schema_is_up_to_date",
)
WITH_TORCH = (
    *("tests/journal", "tests/storage", "tests/core", "tests/train/test_in_process.py"),
    *("tests/pytorch/test_trainer.py", "tests/pytorch/test_state.py"),
    "tests/declarative/test_trainer.py",
)
LIMIT_S = 1200
# A wheel for CUDA takes gigabytes with all that it needs.
CUDA = re.compile(r"^(nvidia|cuda|pytorch-triton)-", re.IGNORECASE)


@dataclass
class Trial:
    """One resolution on one Python, and what came of it."""

    resolution: str
    python: str
    version: str
    torch: str | None = None
    results: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.resolution}-{self.version}"

    @property
    def directory(self) -> Path:
        return PLACE / self.name

    @property
    def program(self) -> Path:
        return self.directory / "bin" / "python"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="a Python to try; all found if none")
    parser.add_argument("--only", choices=[*RESOLUTIONS], help="one of the resolutions")
    parser.add_argument("--steps-only", action="store_true", help="run no tests")
    options = parser.parse_args()
    # An environment's own Python stands for the one that it was made with.
    pythons = [str(Path(shutil.which(p) or p).resolve()) for p in options.python or found_pythons()]
    trials = [
        Trial(resolution, python, version_of(python))
        for python in pythons
        for resolution in ([options.only] if options.only else RESOLUTIONS)
    ]
    for trial in trials:
        try_one(trial, with_tests=not options.steps_only)
    print(table(trials))
    return any(not result.startswith("ok") for t in trials for result in t.results.values())


def found_pythons() -> list[str]:
    """Return the Pythons of this machine that Paceline supports, one for each minor version."""
    found: dict[str, str] = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    named = [shutil.which(f"python3.{minor}") for minor in range(10, 20)]
    for python in (sys.executable, *map(str, sorted(pyenv.glob("3.*/bin/python"))), *named):
        if python and (version := version_of(python)) and int(version[2:]) >= 10:
            found.setdefault(version, python)
    return [found[version] for version in sorted(found, key=lambda version: int(version[2:]))]


def version_of(python: str) -> str:
    """Return the version of a Python, such as 3.12, or nothing if it does not run."""
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def try_one(trial: Trial, with_tests: bool) -> None:
    """Make the environment of a trial, and run in it what there is to run."""
    print(f"== {trial.name}", flush=True)
    shutil.rmtree(trial.directory, ignore_errors=True)
    trial.directory.mkdir(parents=True)
    if not step(trial, "install", lambda log: install(trial, log)):
        return
    steps = [trial.program, ROOT / "tests/versions/first_steps.py", ROOT / "README.md"]
    step(trial, "first steps", lambda log: call(steps, log))
    tests = WITHOUT_TORCH + (WITH_TORCH if trial.torch else ())
    # Releases of several ages deprecate what others of them still use.
    warnings = ["-W", "ignore::DeprecationWarning"] if trial.resolution == "lowest" else []
    pytest = [trial.program, "-m", "pytest", "-q", "-m", "not slow", "-n", "2", *warnings]
    if with_tests:
        step(trial, "tests", lambda log: call([*pytest, "-p", "no:cacheprovider", *tests], log))


def step(trial: Trial, name: str, action) -> bool:
    """Take one step; keep its result, and what it printed in a file."""
    log = trial.directory / f"{name.replace(' ', '-')}.log"
    started = time.monotonic()
    try:
        action(log)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = log.read_text(encoding="utf-8").splitlines()[-15:]
        print("\n".join(lines), f"\n{error}\nAll of it: {log}", flush=True)
        trial.results[name] = "FAILED"
        return False
    trial.results[name] = f"ok, {time.monotonic() - started:.0f} s"
    print(f"{name}: {trial.results[name]}", flush=True)
    return True


def call(command, log: Path) -> None:
    """Run a command in a bounded time; what it prints goes to the end of a file."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "PYTHONPATH"))}
    with log.open("a", encoding="utf-8") as output:
        subprocess.run(
            [str(part) for part in command], cwd=ROOT, env=kept, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, timeout=LIMIT_S, check=True,
        )  # fmt: skip


def install(trial: Trial, log: Path) -> None:
    """Install Paceline with the versions of the trial."""
    own = own_torch(trial.python)
    uv = [sys.executable, "-m", "uv"]
    site = ["--system-site-packages"] if own else []
    call([*uv, "venv", "--allow-existing", "--python", trial.python, *site, trial.directory], log)
    trial.torch = own or wanted_torch(trial)
    overrides, versions = trial.directory / "overrides.txt", trial.directory / "versions.txt"
    overrides.write_text(f"torch=={trial.torch or LOCKED_TORCH}\n")
    tools = trial.directory / "tools.in"
    tools.write_text("\n".join(TOOLS.findall((ROOT / "pyproject.toml").read_text())) + "\n")
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    compile = [*uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    compile += ["pyproject.toml", tools]
    # What has no wheel for this Python is not what a user gets there.
    how = ["--only-binary", ":all:", "--resolution", RESOLUTIONS[trial.resolution]]
    where = ["--python", trial.program, "--override", overrides, "-o", versions]
    call([*compile, *extras, *how, *where], log)
    lines = versions.read_text().splitlines()
    skipped = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton\b|torch==)")
    versions.write_text("\n".join(line for line in lines if not skipped.match(line)) + "\n")
    target = ["--quiet", "--python", trial.program]
    call([*uv, "pip", "install", *target, "--no-deps", "-r", versions], log)
    call([*uv, "pip", "install", *target, "--no-deps", "-e", ROOT], log)
    if trial.torch and not own:
        call([*pip_of(trial), "install", "--no-deps", f"torch=={trial.torch}"], log)


def own_torch(python: str) -> str | None:
    """Return the version of torch that a Python has, without a local part."""
    command = [python, "-Ic", "import torch; print(torch.__version__)"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return said.strip().partition("+")[0] or None


def wanted_torch(trial: Trial) -> str | None:
    """Return the version of torch to install: the wanted one, or that of the lock, or none."""
    [bound] = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    wanted = f"torch=={bound}" if trial.resolution == "lowest" else "torch"
    for requirement in (wanted, f"torch=={LOCKED_TORCH}"):
        ask = ["install", "--dry-run", "--quiet", "--no-deps", "--report", "-", requirement]
        command = [str(word) for word in (*pip_of(trial), *ask)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for offered in json.loads(done.stdout)["install"] if done.returncode == 0 else ():
            about = offered["metadata"]
            if not any(CUDA.match(need) for need in about.get("requires_dist", ())):
                return str(about["version"]).partition("+")[0]
    return None


def pip_of(trial: Trial) -> list[str]:
    """Return the pip that knows the indexes of this machine, for the environment of a trial."""
    return [sys.executable, "-m", "pip", "--python", str(trial.program)]


def table(trials: list[Trial]) -> str:
    """Return what came of all trials, as Markdown."""
    rows = ["| versions | torch | " + " | ".join(("install", "first steps", "tests")) + " |"]
    rows.append("|---" * 5 + "|")
    for trial in trials:
        results = [trial.results.get(name, "") for name in ("install", "first steps", "tests")]
        rows.append(f"| {' | '.join([trial.name, trial.torch or 'none', *results])} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
