"""What is packed as an experiment's code, and what is refused."""

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest

from paceline.client import ContextError
from paceline.client._code_and_run_uploads import list_context, pack_context


def fill(root: Path, *names: str) -> Path:
    """Make files that hold their own names."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def packed_names(root: Path) -> list[str]:
    return [entry.name for entry in list_context(root) if not entry.path.is_dir()]


def pack(root: Path, **options: int) -> tuple[str, bytes]:
    target = io.BytesIO()
    return pack_context(root, target, **options), target.getvalue()


def test_archive_holds_files_with_their_content_and_execute_bit(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", "lib/net.py", "run.sh")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "empty").mkdir()
    _, data = pack(tmp_path)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == ["empty", "lib", "lib/net.py", "run.sh", "train.py"]
        member = archive.extractfile("lib/net.py")
        assert member is not None
        assert member.read() == b"lib/net.py"
        assert archive.getmember("run.sh").mode == 0o755
        assert archive.getmember("train.py").mode == 0o644
        assert archive.getmember("empty").isdir()


def test_same_code_has_the_same_digest_wherever_and_whenever_it_lies(tmp_path: Path) -> None:
    first = fill(tmp_path / "first", "b.py", "a/c.py")
    second = fill(tmp_path / "second", "a/c.py", "b.py")
    os.utime(second / "b.py", (1, 1))
    (second / "b.py").chmod(0o600)
    assert pack(first) == pack(second)
    (second / "b.py").write_text("other")
    assert pack(first)[0] != pack(second)[0]


@pytest.mark.parametrize(
    "name",
    [
        "__pycache__/net.cpython-311.pyc",
        "net.pyc",
        "lib/net.pyo",
        ".git/config",
        ".venv/bin/tool",
        "lib/paceline_runs/one/run.json",
        ".mypy_cache/x",
        ".pytest_cache/x",
        ".idea/x",
        ".vscode/x",
        "notebooks/.ipynb_checkpoints/x",
        "web/node_modules/x/index.js",
    ],
)
def test_what_no_experiment_needs_is_left_out(tmp_path: Path, name: str) -> None:
    fill(tmp_path, "train.py", name)
    assert packed_names(tmp_path) == ["train.py"]


def test_a_virtual_environment_of_any_name_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", "env311/pyvenv.cfg", "env311/bin/python", "lib/e/pyvenv.cfg")
    assert packed_names(tmp_path) == ["train.py"]


def test_the_home_of_a_master_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", "home/master.lock", "home/token", "home/master.sqlite")
    assert packed_names(tmp_path) == ["train.py"]


def test_ignore_file_excludes_and_includes_and_is_not_packed(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", "data/big.bin", "data/small.csv", "notes.txt", ".vscode/settings")
    (tmp_path / ".pacelineignore").write_text("# data\n*.bin\n/notes.txt\n!.vscode/\n")
    assert packed_names(tmp_path) == [".vscode/settings", "data/small.csv", "train.py"]


def test_a_link_inside_stays_a_link(tmp_path: Path) -> None:
    root = fill(tmp_path / "code", "lib/net.py", "train.py")
    (root / "lib" / "main.py").symlink_to("../train.py")
    (root / "absolute.py").symlink_to(root / "lib" / "net.py")
    (root / "library").symlink_to("lib")
    links = {entry.name: entry.link for entry in list_context(root) if entry.link}
    assert links == {
        "lib/main.py": "../train.py",
        "absolute.py": "lib/net.py",
        "library": "lib",
    }
    _, data = pack(root)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(tmp_path / "copy", filter="data")
    assert (tmp_path / "copy" / "absolute.py").read_text() == "lib/net.py"


@pytest.mark.parametrize(
    "target", ["../../secret.txt", "{outside}", "../lib/../../secret.txt", "up/x"]
)
def test_a_link_that_leads_outside_is_refused_by_name(tmp_path: Path, target: str) -> None:
    fill(tmp_path, "secret.txt")
    root = fill(tmp_path / "code", "train.py", "lib/net.py")
    (root / "sub").mkdir()
    (root / "sub" / "up").symlink_to("../..")
    (root / "sub" / "link").symlink_to(target.format(outside=tmp_path / "secret.txt"))
    with pytest.raises(ContextError, match=r"lead outside: sub/link -> .*sub/up -> \.\./\.\."):
        list_context(root)
    (root / ".pacelineignore").write_text("sub/\n")
    assert packed_names(root) == ["lib/net.py", "train.py"]


def test_sockets_and_pipes_are_refused_by_name(tmp_path: Path) -> None:
    fill(tmp_path, "train.py")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "sock"))
        with pytest.raises(ContextError, match="sockets, pipes or devices: pipe, sock"):
            list_context(tmp_path)


def test_too_large_a_context_names_its_largest_files(tmp_path: Path) -> None:
    fill(tmp_path, "train.py")
    (tmp_path / "weights.bin").write_bytes(os.urandom(300_000))
    (tmp_path / "zeros.bin").write_bytes(bytes(200_000))
    with pytest.raises(
        ContextError, match=r"at most 0\.2 MiB.*weights\.bin \(0\.3 MiB\), zeros\.bin"
    ):
        pack(tmp_path, limit_bytes=200_000)
    assert len(pack(tmp_path, limit_bytes=400_000)[1]) <= 400_000


def test_only_a_directory_can_be_packed(tmp_path: Path) -> None:
    fill(tmp_path, "train.py")
    with pytest.raises(ContextError, match=r"`model_dir` must be a directory, but got .*train\.py"):
        list_context(tmp_path / "train.py")
