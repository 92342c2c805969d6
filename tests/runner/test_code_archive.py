"""Archives of code: what is too large is refused before it takes disk or memory."""

import gzip
import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from paceline._cluster.runner.code_archive import (
    ArchiveLimits,
    ArchiveTooLargeError,
    check_archive,
    unpack_archive,
)

MIB = 1024 * 1024
with_and_without_filter = pytest.mark.parametrize("has_filter", [True, False])
LIMITS = ArchiveLimits(num_bytes=16 * MIB, num_files=100)


def bomb(path: Path, size: int, kind: bytes = b"0") -> Path:
    """Write an archive whose one member is `size` zeros, and only claims to be more."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        member = tarfile.TarInfo("x")
        member.type, member.size = kind, size
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        file.write(bytes(min(size, 20 * MIB)))
    return path


def choose_filter(monkeypatch: pytest.MonkeyPatch, *, has_filter: bool) -> None:
    """Have `tarfile` as in this Python, or as in 3.11.3."""
    if has_filter:
        return
    monkeypatch.delattr(tarfile, "data_filter")
    extract = tarfile.TarFile.extractall

    def extractall(archive: tarfile.TarFile, path: Path, members: object) -> None:
        extract(archive, path, members, filter="fully_trusted")  # type: ignore[arg-type]

    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)


@with_and_without_filter
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_a_directory_comes_out_as_it_went_in(
    tmp_path: Path, mode: str, has_filter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_filter(monkeypatch, has_filter=has_filter)
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub").mkdir(parents=True)
    (source / "a.py").write_text("x = 1")
    (source / "sub" / ("long" * 40)).write_bytes(bytes(102_400))
    os.symlink("a.py", source / "link")
    os.link(source / "a.py", source / "hard")
    with tarfile.open(tmp_path / "archive", mode) as archive:  # type: ignore[call-overload]
        archive.add(source, ".")
    target.mkdir()
    unpack_archive(tmp_path / "archive", target, LIMITS)
    assert sorted(p.relative_to(target) for p in target.rglob("*")) == sorted(
        p.relative_to(source) for p in source.rglob("*")
    )
    assert (target / "hard").read_text() == (target / "link").read_text() == "x = 1"
    assert (target / "link").is_symlink()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.mode = kind, link, 0o4777
    found.uid = found.gid = 12345
    return found


@with_and_without_filter
@pytest.mark.parametrize(
    "members",
    [
        [member("../evil")],
        [member("sub/../../evil")],
        [member("out", tarfile.SYMTYPE, "../"), member("out/evil")],
        [member("out", tarfile.SYMTYPE, "/"), member("out/evil")],
        [member("a/b", tarfile.DIRTYPE), member("d", tarfile.SYMTYPE, "a/b"),
         member("out", tarfile.SYMTYPE, "d/../.."), member("d", tarfile.SYMTYPE, "."),
         member("out/evil")],
        [member("evil", tarfile.LNKTYPE, "../secret")],
        [member("evil", tarfile.SYMTYPE, "/etc/passwd")],
        [member("evil", tarfile.CHRTYPE)],
        [member("evil", tarfile.FIFOTYPE)],
    ],
)  # fmt: skip
def test_an_archive_that_leads_outside_writes_nothing_there(
    tmp_path: Path, members: list[tarfile.TarInfo], has_filter: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    choose_filter(monkeypatch, has_filter=has_filter)
    (tmp_path / "secret").write_text("secret")
    path, target = tmp_path / "archive", tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    with tarfile.open(path, "w") as archive:
        for one in members:
            archive.addfile(one)
    with pytest.raises((tarfile.TarError, OSError)):
        unpack_archive(path, target, LIMITS)
    assert not list(tmp_path.rglob("evil"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["archive", "deep", "secret"]
    assert [one.name for one in (tmp_path / "deep").iterdir()] == ["target"]


@with_and_without_filter
def test_owners_and_special_modes_are_left_out(
    tmp_path: Path, has_filter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_filter(monkeypatch, has_filter=has_filter)
    with tarfile.open(tmp_path / "archive", "w") as archive:
        archive.addfile(member("/a"))
    (tmp_path / "target").mkdir()
    unpack_archive(tmp_path / "archive", tmp_path / "target", LIMITS)
    found = (tmp_path / "target" / "a").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (os.getuid(), os.getgid(), 0o755)


@pytest.mark.parametrize(
    ("size", "kind"),
    [(2100 * MIB, b"0"), (17 * MIB, b"0"), (6 * MIB, b"x"), (6 * MIB, b"L"), (6 * MIB, b"g")],
    ids=["claims", "holds", "pax", "long name", "global"],
)
def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, size: int, kind: bytes) -> None:
    path = bomb(tmp_path / "bomb", size, kind)
    assert path.stat().st_size < MIB
    (tmp_path / "target").mkdir()
    tracemalloc.start()
    try:
        for read in (
            lambda: check_archive(path, LIMITS),
            lambda: unpack_archive(path, tmp_path, LIMITS),
        ):
            with pytest.raises(ArchiveTooLargeError, match="must"):
                read()
        assert tracemalloc.get_traced_memory()[1] < 5 * MIB
    finally:
        tracemalloc.stop()


def test_many_files_are_refused_and_a_damaged_archive_is_left_to_who_unpacks_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "many"
    with tarfile.open(path, "w:gz") as archive:
        for number in range(101):
            archive.addfile(tarfile.TarInfo(str(number)), io.BytesIO())
    with pytest.raises(ArchiveTooLargeError, match="at most 16 MiB and 100 files"):
        check_archive(path, LIMITS)
    for damaged in (b"", b"no archive", path.read_bytes()[:50]):
        path.write_bytes(damaged)
        check_archive(path, LIMITS)


def test_the_limits_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_MAX_UNPACKED_MIB", "3")
        assert ArchiveLimits.from_environment() == ArchiveLimits(3 * MIB, 100_000)
        patch.setenv("PACELINE_MAX_UNPACKED_FILES", "-1")
        with pytest.raises(ValueError, match=r"UNPACKED_FILES` must be an integer above 0, but"):
            ArchiveLimits.from_environment()
