"""Make Paceline importable beside the torch that is there, without a network; print PYTHONPATH.

Nothing of the interpreter's own packages is changed: the wheels in the folder `wheels` whose
packages are missing or too old are unpacked into `build/gpu-site`, and Paceline itself is taken
from `src`. What is still missing is told on the error output; the parts that need it are left out.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_SITE = _ROOT / "build" / "gpu-site"
_WHEELS = _ROOT / "wheels"
# Whatever the project asks for, the torch that is there is the one to try.
_KEPT = "torch"
_WANTED_FOR_TESTS = ("pytest",)
# Tests and rows of their own need them, which are left out without.
_TAKEN_IF_THERE = (
    "flask-cors", "moto", "obstore", "pytest-timeout", "pytest-xdist",
    "pytorch-ignite",
)  # fmt: skip
_MODULES = {"argon2-cffi": "argon2", "nvidia-ml-py": "pynvml", "pyyaml": "yaml"}


def main() -> int:
    """Unpack what is missing, tell what still is, and print where all of it is."""
    if _not_importable([_KEPT], []):
        say(f"{sys.executable} must have torch, but cannot import it. Hint: PYTHON=/path/to/python")
        return 1
    shutil.rmtree(_SITE, ignore_errors=True)
    _SITE.mkdir(parents=True)
    paths = [str(_SITE), str(_ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    project = (_ROOT / "pyproject.toml").read_text()
    _write_metadata(project)
    wanted = dict(_requirements(project))
    _unpack_wheels(wanted)
    missing = _not_importable([*wanted, *_WANTED_FOR_TESTS], paths)
    if missing:
        say(
            f"missing, so that some parts are left out: {', '.join(missing)}. Hint: `make"
            " gpu-wheels` where there is a network, and bring the folder `wheels`."
        )
    print(os.pathsep.join(paths))
    return 0


def say(text: str) -> None:
    """Tell the user something, apart from what is printed for the shell."""
    print(f"gpu_install: {text}", file=sys.stderr)


def _requirements(project: str) -> Iterator[tuple[str, str]]:
    """Yield the names of what Paceline requires, with their lowest versions.

    Versions that it cannot use lie above the lowest ones: what is below the next is too old.
    """
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    pattern = r'"([\w.-]+)(?:>=([\w.]+))?(?:,!=([\w.]+)\.\*)?"'
    for name, lowest, excluded in re.findall(pattern, listed[1]):
        if name != _KEPT:
            yield name, _next_version(excluded) if excluded else lowest


def _next_version(version: str) -> str:
    *first, last = version.split(".")
    return ".".join([*first, str(int(last) + 1)])


def _write_metadata(project: str) -> None:
    """Say which version of Paceline this is, as an installation does; no builder is needed."""
    version = re.search(r'^version = "(.+)"', project, re.MULTILINE)
    assert version is not None
    folder = _SITE / f"paceline-{version[1]}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: paceline", f"Version: {version[1]}"]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def _unpack_wheels(wanted: dict[str, str]) -> None:
    """Unpack the wheels of packages that are missing or too old."""
    needed = _needed_wheels(wanted)
    if not needed:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--upgrade"]
    done = subprocess.run(
        [*command, "--target", str(_SITE), *map(str, needed)], capture_output=True, text=True
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no pip"]
        say(f"pip did not unpack the wheels ({last[0]}), so they are unpacked without it")
        for path in needed:
            zipfile.ZipFile(path).extractall(_SITE)
    say(f"unpacked {len(needed)} wheels into {_SITE.relative_to(_ROOT)}")


def _needed_wheels(wanted: dict[str, str]) -> list[Path]:
    """Return the wheels of what is missing or too old, and of what these require.

    What is there keeps what it requires, as some packages want one version of another alone.
    """
    wheels = {_plain(path.name.split("-")[0]): path for path in sorted(_WHEELS.glob("*.whl"))}
    lowest = {_plain(name): version for name, version in wanted.items()}
    lowest |= dict.fromkeys((*_WANTED_FOR_TESTS, *_TAKEN_IF_THERE), "0")
    names = [name for name in lowest if _is_below(name, lowest[name])]
    needed: dict[str, Path] = {}
    while names:
        name = names.pop()
        path = wheels.get(name)
        if path is None or name in needed:
            continue
        needed[name] = path
        for other in _required_by(path):
            if other in wheels and _is_below(other, wheels[other].name.split("-")[1]):
                names.append(other)
    return list(needed.values())


def _required_by(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    for found, marker in re.findall(r"^Requires-Dist: ([\w.-]+)(.*)$", text, re.MULTILINE):
        if "extra ==" not in marker:
            yield _plain(found)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_below(name: str, lowest: str) -> bool:
    """Tell whether a package is missing, or older than a version."""
    present = _version_of(name)
    return present is None or _numbers(present) < _numbers(lowest)


def _version_of(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _not_importable(names: Iterable[str], paths: list[str]) -> list[str]:
    """Return those of some packages that cannot be imported, for whatever they lack."""
    code = """
import importlib, sys
sys.path[:0] = sys.argv[1].split("\\n")
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except Exception:
        print(name)
"""
    modules = {_MODULES.get(name, name): name for name in names}
    command = [sys.executable, "-c", code, "\n".join(paths), *modules]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    return [modules[module] for module in output.split()]


if __name__ == "__main__":
    sys.exit(main())
