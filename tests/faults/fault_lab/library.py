"""The library that has calls of libc fail, and the directory by which it is told how.

A process takes part if it is started with `FaultLab.environment`, and so does what it starts.
"""

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SOURCES = Path(__file__).parent.parent / "library"
_BUILD = Path(__file__).parents[3] / "build" / "faults"
_HEADER = struct.Struct("<IIQqIIII")
_MAGIC = 0xFA171AB5

RESULT, OPEN, WRITE, TRUNCATE, SYNC, SYNCED, RENAME, LINK, UNLINK, MKDIR, RMDIR = range(11)


class NoCompilerError(RuntimeError):
    """Raised where the library cannot be built."""


def build_library() -> Path:
    """Compile the library unless it is up to date, and return it.

    Raises:
        NoCompilerError: There is no C compiler.
    """
    sources = sorted(_SOURCES.glob("*.[ch]"))
    library = _BUILD / "libfaults.so"
    if library.exists() and library.stat().st_mtime > max(s.stat().st_mtime for s in sources):
        return library
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None or os.uname().sysname != "Linux":
        raise NoCompilerError("NOT TESTED: the library of faults needs Linux and a C compiler")
    _BUILD.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(f".{os.getpid()}")
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    files = [str(path) for path in sources if path.suffix == ".c"]
    subprocess.run([compiler, *options, "-o", part, *files, "-ldl", "-lpthread"], check=True)
    part.replace(library)
    return library


@dataclass(frozen=True)
class Hit:
    """A call that a rule has struck."""

    rule: int
    call: str
    pid: int
    path: str


@dataclass(frozen=True)
class Record:
    """A call that changed files; `number` is an offset, a length, flags or a result."""

    kind: int
    order: int
    number: int
    pid: int
    path: str
    other: str
    data: bytes


class FaultLab:
    """A directory from which processes are told which of their calls fail."""

    def __init__(self, directory: Path) -> None:
        self._library = build_library()
        self.directory = directory
        directory.mkdir(parents=True)
        (directory / "rules").touch()
        if ctypes.CDLL(str(self._library)).fault_lab_prepare(str(directory / "state").encode()):
            raise OSError("The state of the laboratory cannot be made.")
        with (directory / "state").open("r+b") as file:
            self._state = mmap.mmap(file.fileno(), 0)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a process that takes part."""
        return {"LD_PRELOAD": str(self._library), "FAULT_LAB": str(self.directory)}

    def set_rules(self, *rules: str) -> None:
        """Put other rules in place, which count from now on; see rules.c for their form."""
        part = self.directory / "rules.part"
        part.write_text("".join(f"{rule}\n" for rule in rules))
        part.replace(self.directory / "rules")
        struct.pack_into("<64Q", self._state, 16, *[0] * 64)
        (generation,) = struct.unpack_from("<Q", self._state, 0)
        struct.pack_into("<Q", self._state, 0, generation + 1)

    @property
    def order(self) -> int:
        """The number of the newest record."""
        return int(struct.unpack_from("<Q", self._state, 8)[0])

    def hits(self) -> list[Hit]:
        """Return the calls that were struck, by all rules there were."""
        with suppress(FileNotFoundError):
            lines = (self.directory / "hits").read_text(errors="replace").splitlines()
            parts = [line.split(" ", 3) for line in lines]
            return [Hit(int(rule), call, int(pid), path) for rule, call, pid, path in parts]
        return []

    def records(self) -> Iterator[Record]:
        """Yield what was recorded, in its order."""
        data = (self.directory / "record").read_bytes()
        at = 0
        while at + _HEADER.size <= len(data):
            fields = _HEADER.unpack_from(data, at)
            magic, kind, order, number, pid, size_path, size_other, size_data = fields
            assert magic == _MAGIC, f"The record is damaged at byte {at}."
            at += _HEADER.size
            path, at = data[at : at + size_path], at + size_path
            other, at = data[at : at + size_other], at + size_other
            content, at = data[at : at + size_data], at + size_data
            yield Record(kind, order, number, pid, os.fsdecode(path), os.fsdecode(other), content)

    def close(self) -> None:
        """Let go of the state."""
        self._state.close()
