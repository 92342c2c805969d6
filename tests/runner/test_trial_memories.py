"""Memory of a trial: which attempt gets its states, and when it is removed."""

import fcntl
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline._base.files import remove_leftover_directories
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.journal_records import AttemptStarted, check_seal, seal
from paceline._base.run_directory import JournalKey, RunDirectory, RunInfo
from paceline._base.run_memory import own_run_memory, run_memory
from paceline._cluster.messages.runner_messages import AttemptSpec, MasterAddress
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.attempt_end import _judged_end, make_attempt_end
from paceline._cluster.runner.master_link import MasterLink
from paceline._cluster.runner.record_shipping import Shipper
from paceline._cluster.runner.trial_memories import TrialMemories, hold_memory, keep_memory


class Node:
    """The memory of a node's trials, and attempts there."""

    def __init__(self, root: Path, memory: Path) -> None:
        self.root, self.memory = root, memory
        self.memories = TrialMemories(root)

    def begin(self, attempt_id: int, key: str = "", trial_id: int = 5, **facts: Any) -> Any:
        """Give an attempt memory, and return the path."""
        spec = AttemptSpec(
            attempt_id=attempt_id, trial_id=trial_id, number=attempt_id, entrypoint="true",
            python="python3", variables={}, working_dir=None, context_digest=None, slot_ids=[0],
            num_threads=1, gpu_ids=[], keep_directory=False, memory=key, **facts,
        )  # fmt: skip
        directory = AttemptDirectory.create(self.root / str(attempt_id), spec)
        self.memories.give(spec)
        return hold_memory(directory, spec)

    def end(self, attempt_id: int, *, has_begun: bool = True, **facts: Any) -> str:
        """End an attempt, and return the key of the states that it leaves."""
        directory = AttemptDirectory(self.root / str(attempt_id))
        if has_begun:
            write_journal(directory)
        given = {"reason": ExitReason.EXITED, "code": 137} | facts
        return keep_memory(directory, make_attempt_end(**given)).memory


def write_journal(directory: AttemptDirectory) -> None:
    """Write the record of a chief that has begun."""
    info = RunInfo(run_id="trial-5", name="n", created=0.0, checkpoint_storage="/nowhere")
    run = RunDirectory.create(directory.run.path, info)
    journal = JournalWriter(run.journal_path(JournalKey(attempt=1, generation=0, rank=0)))
    journal.append(
        AttemptStarted(
            time=0.0, attempt=1, generation=0, rank=0, world_size=1, pid=1, host="h",
            resumed_from=None, steps_completed=0,
        )
    )  # fmt: skip
    journal.close()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return a node whose memory is empty."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("PACELINE_MEMORY_DIR", str(memory))
    (tmp_path / "attempts").mkdir()
    return Node(tmp_path / "attempts", memory)


def put_state(path: str) -> Path:
    state = Path(path) / "trial-5" / "state"
    state.mkdir(parents=True)
    return state


def test_the_attempt_that_knows_the_end_gets_the_states(node: Node) -> None:
    path = node.begin(1)
    assert os.stat(path).st_mode & 0o777 == 0o700
    state = put_state(path)
    (Path(path) / "claim").write_text("1")
    key = node.end(1)
    assert key
    assert node.begin(2, key) == path
    assert state.exists()
    assert not (Path(path) / "claim").exists()
    # The start is repeated after a failure.
    assert node.begin(2, key) == path
    assert node.begin(6, trial_id=6) != path


@pytest.mark.parametrize("key", ["", "0123456789abcdef"])
def test_states_of_another_end_are_removed(node: Node, key: str) -> None:
    path = node.begin(1)
    put_state(path)
    assert node.end(1)
    other = node.begin(2, key)
    assert other is not None
    assert [*node.memory.iterdir()] == [Path(other)]
    assert [*Path(other).iterdir()] == []


@pytest.mark.parametrize(
    "facts",
    [
        {"code": 0},
        {"reason": ExitReason.KILLED},
        {"reason": ExitReason.START_FAILED, "code": None},
        {"has_begun": False},
    ],
)
def test_an_end_after_which_nothing_is_lost_leaves_no_states(
    node: Node, facts: dict[str, Any]
) -> None:
    node.begin(1)
    assert not node.end(1, **facts)
    node.memories.sweep(lambda attempt_id: False)
    assert not [*node.memory.iterdir()]


@pytest.mark.parametrize("facts", [{"has_prefix": True}, {"interactive": "shell"}])
def test_these_have_no_memory(node: Node, facts: dict[str, Any]) -> None:
    assert node.begin(1, **facts) is None
    assert not [*node.memory.iterdir()]


def age(node: Node, seconds: float, **changed: Any) -> None:
    path = node.root / "memory-5"
    note = msgspec.json.decode(check_seal(path.read_bytes()))
    note |= {"kept_at": time.time() - seconds} | changed
    path.write_bytes(seal(msgspec.json.encode(note)))


@pytest.mark.parametrize(("seconds", "is_kept"), [(30, True), (90, False), (-90, False)])
def test_states_wait_for_a_short_time(node: Node, seconds: float, is_kept: bool) -> None:
    path = Path(node.begin(1))
    node.memories.sweep(lambda attempt_id: attempt_id == 1)
    assert path.exists()
    node.end(1)
    age(node, seconds)
    node.memories.sweep(lambda attempt_id: False)
    assert path.exists() == is_kept
    node.memories.close(lambda attempt_id: False)
    assert not path.exists()
    assert not (node.root / "memory-5").exists()


@pytest.mark.parametrize(
    ("member", "facts", "is_kept"),
    [
        (0, {"code": 1}, True),
        (0, {"reason": ExitReason.KILLED}, True),
        (0, {"has_begun": False}, False),
        (1, {"reason": ExitReason.KILLED, "has_begun": False}, True),
        (1, {"code": 0, "has_begun": False}, False),
    ],
)
def test_a_node_of_several_keeps_states_until_a_lost_one_is_noticed(
    node: Node, member: int, facts: dict[str, Any], is_kept: bool
) -> None:
    """The loss of one node kills the rest of the attempt, and rank 0 reports on the first node."""
    path = Path(node.begin(1, num_members=2, member=member, lease_s=50.0))
    assert bool(node.end(1, **facts)) == is_kept
    if is_kept:
        age(node, 105)
        node.memories.sweep(lambda attempt_id: False)
        assert path.exists()
        age(node, 115)
    node.memories.sweep(lambda attempt_id: False)
    assert not path.exists()


def test_a_job_cannot_have_its_memory_kept_for_ever(node: Node) -> None:
    path = Path(node.begin(1))
    node.end(1)
    age(node, 4000, keep_s=1e12)
    node.memories.sweep(lambda attempt_id: False)
    assert not path.exists()


def test_the_next_process_finds_the_memory_again(node: Node) -> None:
    program = "import sys; exec(sys.stdin.read())"
    path = Path(node.begin(1))
    key = node.end(1)
    # Locks of this process end with their descriptors.
    for name in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{name}") == str(path):
            os.close(int(name))
    again = Node(node.root, node.memory)
    sweep = (
        "from pathlib import Path\n"
        "from paceline._base.files import remove_leftover_directories\n"
        f"remove_leftover_directories(Path({str(node.memory)!r}))"
    )
    subprocess.run([sys.executable, "-c", program], input=sweep, text=True, check=True)
    assert path.exists()
    assert again.begin(2, key) == str(path)


def test_memory_of_a_killed_owner_is_a_leftover(node: Node) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from paceline._base.files import make_locked_directory\n"
        f"make_locked_directory(Path({str(node.memory)!r}))\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    [path] = node.memory.iterdir()
    remove_leftover_directories(node.memory)
    assert not path.exists()


@pytest.mark.parametrize("what", ["a link", "a deep tree", "a claim that is no file"])
def test_what_a_job_leaves_is_removed_and_leads_nowhere(
    node: Node, tmp_path: Path, what: str
) -> None:
    path = Path(node.begin(1))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    key = node.end(1)
    if what == "a link":
        path.rename(tmp_path / "moved")
        path.symlink_to(outside)
    elif what == "a deep tree":
        make_deep(path)
    else:
        (path / "claim").mkdir()
    found = node.begin(2, key)
    if what == "a deep tree":
        node.end(2, code=0)
        node.memories.sweep(lambda attempt_id: False)
        # It is in nobody's way.
        assert node.begin(7, trial_id=7)
        subprocess.run(["rm", "-rf", str(path)], check=True)
    else:
        assert found is None or found != str(path)
    assert (outside / "file").exists()


def make_deep(path: Path) -> None:
    here = os.open(path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_one_process_at_a_time_uses_the_memory(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = node.begin(1)
    monkeypatch.setenv("PACELINE_TRIAL_MEMORY", path)
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    state = put_state(path)
    with run_memory(is_wanted=False) as first, run_memory(is_wanted=True) as second:
        assert first == {"PACELINE_RUN_MEMORY": path}
        assert [*second] == [*first]
        assert second != first
        with pytest.raises(BlockingIOError):
            own_run_memory(is_alone=True)
        assert own_run_memory() is None
    assert state.exists()
    # Later in the attempt, its own states stay, though it has trained.
    (tmp_path / "journal").mkdir()
    with run_memory(is_wanted=False) as third:
        assert third == first
    assert state.exists()
    # Those of the attempt before are stale then.
    (Path(path) / "claim").unlink()
    with run_memory(is_wanted=False):
        assert not state.exists()
        with pytest.raises(BlockingIOError):
            own_run_memory(is_alone=True)
        put_state(path)
    with run_memory(is_wanted=False):
        assert state.exists()
    # Another place is the job's wish.
    monkeypatch.setenv("PACELINE_MEMORY_DIR", str(tmp_path))
    with run_memory(is_wanted=False) as none:
        assert not none


def test_memory_holds_no_file_open_for_writing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each worker searches all of its objects for files to flush when it ends."""

    def writable() -> set[str]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE:
                    found.add(name)
        return found

    monkeypatch.setenv("PACELINE_TRIAL_MEMORY", node.begin(1))
    before = writable()
    with run_memory(is_wanted=False) as variables:
        assert variables
        assert writable() == before


def test_the_key_is_not_sent_if_reports_cannot_be_stored(node: Node) -> None:
    node.begin(1)
    directory = AttemptDirectory(node.root / "1")
    write_journal(directory)
    end = keep_memory(directory, make_attempt_end(ExitReason.EXITED, code=137))
    shipper = Shipper(directory, 1, MasterLink(lambda: MasterAddress(url="http://127.0.0.1:9")))
    assert _judged_end(end, shipper, None, None).memory == end.memory != ""
    assert _judged_end(end, shipper, "The journal is damaged.", None).memory == ""
    shipper.close()


def test_a_note_that_a_job_has_written_removes_nothing_else(node: Node, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    node.begin(1)
    for path in (foreign, node.memory / "paceline-locked-x" / ".." / ".." / "foreign"):
        text = msgspec.json.encode({"path": str(path), "attempt_id": 1, "key": "k"})
        (node.root / "memory-5").write_bytes(seal(text))
        directory = AttemptDirectory(node.root / "1")
        assert hold_memory(directory, directory.read_spec()) is None
        node.memories.sweep(lambda _: False)
        assert foreign.is_dir()
