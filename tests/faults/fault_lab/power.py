"""A power loss: the files that a disk may have when the machine stops at some record.

What a sync has covered is there. Each other write is there, lacks its end, or is not there at all;
so is each other change of a directory. The model promises no more than POSIX does: the sync of a
file says nothing about its name, and that of a directory nothing about its parent.
"""

import os
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fault_lab.library import (
    LINK,
    MKDIR,
    OPEN,
    RENAME,
    RESULT,
    RMDIR,
    SYNC,
    SYNCED,
    TRUNCATE,
    UNLINK,
    WRITE,
    Record,
)

_SECTOR = 512
ROOT = 0


@dataclass
class _Change:
    """A change of a file's data, or of names in directories."""

    order: int
    node: int
    is_durable: bool = False
    # Of data: at an offset, or a new length.
    data: bytes | None = None
    number: int = 0
    # Of names: (directory, name); the first is the one that vanishes.
    gone: tuple[int, str] | None = None
    made: tuple[int, str] | None = None

    @property
    def is_of_names(self) -> bool:
        return self.gone is not None or self.made is not None


@dataclass
class History:
    """All changes of the files below a directory up to a record, and which a sync has covered."""

    root: Path
    changes: list[_Change] = field(default_factory=list)
    directories: set[int] = field(default_factory=lambda: {ROOT})

    def __post_init__(self) -> None:
        self._names: dict[int, dict[str, int]] = {ROOT: {}}
        self._num_nodes = 1
        self._syncing: dict[int, int | None] = {}

    def follow(self, records: Iterable[Record], last: int) -> "History":
        """Take in the records up to one."""
        wanted = [record for record in records if record.order <= last]
        results = {
            int.from_bytes(record.data, "little"): record.number
            for record in wanted
            if record.kind == RESULT
        }
        for record in wanted:
            result = results.get(record.order)
            if record.kind != RESULT and (result is None or result >= 0):
                self._take(record, result)
        return self

    def _take(self, record: Record, result: int | None) -> None:
        if record.kind == OPEN:
            self._open(record)
        elif record.kind == WRITE:
            node = self._find(record.path)
            if node is not None:
                data = record.data if result is None else record.data[:result]
                self._add(record, node, data=data, number=record.number)
        elif record.kind == TRUNCATE:
            node = self._find(record.path)
            if node is not None:
                self._add(record, node, number=record.number)
        elif record.kind == SYNC:
            self._syncing[record.order] = self._find(record.path)
        elif record.kind == SYNCED:
            self._sync(self._syncing.pop(record.number, None), record.number)
        elif record.kind == MKDIR:
            node = self._new()
            self._names[node] = {}
            self.directories.add(node)
            self._name(record, node, made=record.path)
        else:
            self._move(record)

    def _move(self, record: Record) -> None:
        node = self._find(record.path)
        if node is None:
            return
        assert record.kind in (RENAME, LINK, UNLINK, RMDIR), record
        gone = None if record.kind == LINK else record.path
        made = record.other if record.kind in (RENAME, LINK) else None
        self._name(record, node, gone=gone, made=made)

    def _open(self, record: Record) -> None:
        node = self._find(record.path)
        if node is None and record.number & os.O_CREAT:
            self._name(record, self._new(), made=record.path)
        elif node is not None and record.number & os.O_TRUNC:
            self._add(record, node, number=0)

    def _new(self) -> int:
        self._num_nodes += 1
        return self._num_nodes - 1

    def _add(self, record: Record, node: int, *, number: int, data: bytes | None = None) -> None:
        self.changes.append(_Change(record.order, node, data=data, number=number))

    def _name(
        self, record: Record, node: int, *, gone: str | None = None, made: str | None = None
    ) -> None:
        change = _Change(record.order, node)
        if gone is not None:
            change.gone = self._place(gone)
        if made is not None:
            change.made = self._place(made)
        _apply(change, self._names)
        self.changes.append(change)

    def _place(self, path: str) -> tuple[int, str]:
        folder = self._find(str(Path(path).parent))
        if folder is None:
            # It was made before the recording, and so is on disk.
            folder = self._new()
            self._names[folder] = {}
            self.directories.add(folder)
            place = self._place(str(Path(path).parent))
            change = _Change(0, folder, is_durable=True, made=place)
            _apply(change, self._names)
            self.changes.append(change)
        return folder, Path(path).name

    def _find(self, path: str) -> int | None:
        node: int | None = ROOT
        for part in Path(os.path.normpath(path)).relative_to(self.root).parts:
            if node is None:
                return None
            node = self._names.get(node, {}).get(part)
        return node

    def _sync(self, node: int | None, before: int) -> None:
        for change in self.changes:
            if node is None or change.order >= before:
                continue
            places = [place[0] for place in (change.gone, change.made) if place is not None]
            change.is_durable |= node in places if change.is_of_names else change.node == node


def _apply(change: _Change, names: dict[int, dict[str, int]]) -> None:
    if change.gone is not None:
        folder, name = change.gone
        if names.setdefault(folder, {}).get(name) == change.node:
            del names[folder][name]
    if change.made is not None:
        folder, name = change.made
        names.setdefault(folder, {})[name] = change.node


def keep_all(change: _Change) -> float:
    """A machine that is stopped in order."""
    return 1.0


class Loss:
    """Which of the changes that no sync has covered reach the disk, and how much of them."""

    KINDS = ("none", "first", "some", "names only", "names in order", "data only")

    def __init__(self, seed: int, history: History, kind: str | None = None) -> None:
        self._random = random.Random(seed)
        open_changes = [change.order for change in history.changes if not change.is_durable]
        self.kind = kind or self._random.choice(self.KINDS)
        self._until = self._random.choice(open_changes) if open_changes else 0
        self._chance = self._random.random()

    def __call__(self, change: _Change) -> float:
        """Return the part of a change that is on disk, from 0 to 1."""
        if self.kind == "none":
            return 0.0
        if self.kind == "first" or (self.kind == "names in order" and change.is_of_names):
            return float(change.order <= self._until)
        if self.kind in ("names only", "data only"):
            return float(change.is_of_names == (self.kind == "names only"))
        if self._random.random() < self._chance:
            return 1.0
        return 0.0 if change.is_of_names or self._random.random() < 0.5 else self._random.random()


def restore(history: History, loss: Loss | None) -> None:
    """Put the files below the root as they are after the loss; without one, as they were last."""
    names: dict[int, dict[str, int]] = {}
    contents: dict[int, bytearray] = {}
    for change in history.changes:
        part = 1.0 if loss is None or change.is_durable else loss(change)
        if change.is_of_names:
            if part:
                _apply(change, names)
            continue
        content = contents.setdefault(change.node, bytearray())
        if change.data is None:
            if part:
                _resize(content, change.number)
        else:
            size = len(change.data)
            if part < 1.0:
                size = int(size * part) // _SECTOR * _SECTOR
            if size:
                _resize(content, max(len(content), change.number + size))
                content[change.number : change.number + size] = change.data[:size]
    shutil.rmtree(history.root)
    _write(history.root, ROOT, names, contents, history.directories)


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _write(
    place: Path,
    node: int,
    names: dict[int, dict[str, int]],
    contents: dict[int, bytearray],
    directories: set[int],
) -> None:
    place.mkdir(mode=0o700)
    for name, child in names.get(node, {}).items():
        if child in directories:
            _write(place / name, child, names, contents, directories)
        else:
            descriptor = os.open(place / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(contents.get(child, b""))
