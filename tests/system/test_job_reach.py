"""What a job can reach beyond its own attempt: processes above it, the master, files of others."""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_lab.nodes import NodeProcess

from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline.client import ApiError
from paceline.storage import DirectoryStorage

# Notes what it can reach, and waits until the file is there.
SCRIPT = """
import json, os, time, urllib.error, urllib.request
from pathlib import Path

import paceline as det
from paceline._cluster.runner.attempt_directory import AttemptDirectory

def contents(path):
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError as error:
        return type(error).__name__

def processes():
    pid = os.getpid()
    while pid:
        yield str(pid), [contents(f"/proc/{pid}/{name}") for name in ("environ", "cmdline")]
        pid = int(contents(f"/proc/{pid}/stat").rpartition(") ")[2].split()[1])

def status(token, method, path):
    url = os.environ["URL"] + "/api/v1" + path
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = None if method == "GET" else b"{}"
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        return urllib.request.urlopen(request, timeout=200).status
    except urllib.error.HTTPError as error:
        return error.code

directory = AttemptDirectory(Path(os.environ["PACELINE_RUN_DIR"]).parent)
own = int(directory.path.name)
other = 3 - own
token = directory.read_spec().token
forged = token.replace(f"attempt_{own}_", f"attempt_{other}_")
assert forged != token
senders = {"itself": token, "nobody": None, "another": forged}
requests = [
    ("GET", "/experiments"), ("POST", "/experiments"), ("GET", "/tokens"), ("POST", "/tokens"),
    ("GET", "/users"), ("GET", f"/attempts/{other}/control"), ("POST", f"/attempts/{other}/end"),
    ("POST", f"/attempts/{other}/records"), ("POST", "/master/shutdown"),
]
with det.core.init() as context:
    found = {
        "uid": os.getuid(),
        "processes": dict(processes()),
        "answers": {
            name: {" ".join(request): status(secret, *request) for request in requests}
            for name, secret in senders.items()
        },
        "own": status(token, "GET", f"/attempts/{own}/control"),
        "home": {name: contents(Path(os.environ["MASTER_HOME"], name)) for name in
                 ("token", "attempt_key", "secrets.json", "master.sqlite")},
    }
    place = Path(os.environ["FOUND"], f"{own}.json")
    place.with_suffix(".part").write_text(json.dumps(found))
    place.with_suffix(".part").rename(place)
    while not Path(os.environ["FOUND"], "gate").exists():
        time.sleep(0.02)
    context.train.report_validation_metrics(1, {"loss": 1.0})
"""
# Tries links, forged records and FIFOs in a storage that it shares with the master, and notes what
# it was given. `PRIVATE` and `SECRET` are a directory and a file of the master's user.
ATTACK = """
import json, os, time, urllib.error, urllib.parse, urllib.request
from pathlib import Path

import paceline as det
from paceline._cluster.runner.attempt_directory import AttemptDirectory

directory = AttemptDirectory(Path(os.environ["PACELINE_RUN_DIR"]).parent)
token, own = directory.read_spec().token, int(directory.path.name)
home, private = Path(os.environ["MASTER_HOME"]), Path(os.environ["PRIVATE"])
storage = Path(os.environ["STORAGE"])

def ask(method, path, body=None, **query):
    url = f"{os.environ['URL']}/api/v1/attempts/{own}/{path}?{urllib.parse.urlencode(query)}"
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        reply = urllib.request.urlopen(request, timeout=200)
        return reply.status, reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")

def piece(uuid, name):
    return ask("GET", f"checkpoints/{uuid}/pieces", name=name, offset=0)

def replace(path, make):
    path.unlink()
    make(path)

found = {"uid": os.getuid()}
with det.core.init() as context:
    uuids = []
    for step in (1, 2):
        with context.checkpoint.store_path({"steps_completed": step}) as (path, uuid):
            for name in ("link", "fifo", "hard"):
                (path / name).write_text("mine")
            (path / "deep").mkdir()
            (path / "deep" / "token").write_text("mine")
        uuids.append(uuid)
    while ask("GET", f"checkpoints/{uuid}")[0] != 200:
        time.sleep(0.02)
    found["whole"] = piece(uuid, "deep/token")
    place = storage / uuid
    replace(place / "link", lambda path: path.symlink_to(home / "token"))
    replace(place / "fifo", os.mkfifo)
    found["link"], found["fifo"] = piece(uuid, "link"), piece(uuid, "fifo")
    try:
        replace(place / "hard", lambda path: os.link(os.environ["SECRET"], path))
        found["hard"] = piece(uuid, "hard")
    except PermissionError:
        found["hard"] = 409, "The kernel forbids it."
    (place / "deep").rename(place / "away")
    (place / "deep").symlink_to(home)
    found["folder"] = piece(uuid, "deep/token")
    replace(place / "rank-0.done", lambda path: path.symlink_to(home / "token"))
    found["done"] = ask("GET", f"checkpoints/{uuid}")
    # The other checkpoint, by a link in place of its directory.
    (storage / uuids[0]).rename(storage / "away")
    (storage / uuids[0]).symlink_to(private / "checkpoint")
    found["checkpoint"] = piece(uuids[0], "link")
    for number, name in enumerate(("website", "checkpoint")):
        record = {
            "type": "checkpoint", "time": 1.0, "uuid": name, "steps_completed": 1, "metadata": {},
            "resources": {"link": 4}, "storage": str(private),
        }
        batch = {"generation": 0, "rank": 2, "records": [[number, record]]}
        found[f"forged {name}"] = ask("POST", "records", {"batches": [batch]})
        found[name] = piece(name, "index.html")
    (mark,) = storage.glob(".paceline-*")
    for number in range(200):
        (storage / f".{mark.name}.{os.environ['MASTER_PID']}.{number}").symlink_to(
            private / "website" / "index.html"
        )
    replace(mark, os.mkfifo)
    for name in (".open", ".incoming"):
        (storage / name).symlink_to(private)
    context.train.report_validation_metrics(2, {"loss": 1.0})
Path(os.environ["FOUND"]).write_text(json.dumps(found))
"""
TRAIN = """
import paceline as det

with det.core.init() as context:
    context.train.report_validation_metrics(1, {"loss": 1.0})
"""
USER_TOKEN = "secret-of-the-user"
OTHER_UID = 65534


@pytest.fixture
def master(make_master: Callable[..., Any]) -> Any:
    """Return a master without slots of its own."""
    return make_master(0).start()


@pytest.fixture
def open_place() -> Iterator[Path]:
    """Return a directory that all users may enter."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def run_jobs(
    write_context: Callable[..., Path], wait_until: Callable[..., None], tmp_path: Path
) -> Iterator[Callable[..., list[Any]]]:
    """Return a function that runs two jobs at once, and returns what each has found.

    They end after the test, so that it can look at them.
    """
    started: list[Any] = []
    places: list[Path] = []

    def run(master: Any, place: Path = tmp_path) -> list[Any]:
        variables = {
            "URL": master.client().url, "MASTER_HOME": str(master.home), "FOUND": str(place)
        }  # fmt: skip
        config: dict[str, Any] = {
            "entrypoint": "python3 train.py", "max_restarts": 0,
            "hyperparameters": {"n": {"type": "categorical", "vals": [0, 1]}},
            "searcher": {"name": "grid", "metric": "loss"},
            "environment": {"variables": variables},
        }  # fmt: skip
        wait_until(lambda: master.client().slots())
        started.append(master.client().create_experiment(config, write_context(SCRIPT)))
        places.append(place)
        files = [place / f"{attempt_id}.json" for attempt_id in (1, 2)]
        wait_until(
            lambda: all(path.exists() for path in files) or started[0].reload().data.ended_at
        )
        assert all(path.exists() for path in files), logs()
        return [json.loads(path.read_text()) for path in files]

    def logs() -> list[str]:
        return [line.text for trial in started[0].trials() for line in trial.iter_logs()]

    yield run
    assert started, "no job has run"
    (places[0] / "gate").touch()
    wait_until(lambda: started[0].reload().data.ended_at)
    # No job has ended another one.
    assert started[0].state.value == "COMPLETED", logs()


def tokens_of_attempts(attempts: Path) -> set[str]:
    tokens = {AttemptDirectory(attempts / str(id_)).read_spec().token for id_ in (1, 2)}
    assert len(tokens) == 2
    return {token for token in tokens if token}


def assert_no_process_shows(found: Any, secrets: set[str], *, above: int) -> None:
    """Check the processes above a job, one of which has the number `above`."""
    assert str(above) in found["processes"]
    assert len(found["processes"]) > 3
    for pid, texts in found["processes"].items():
        assert not [secret for secret in secrets if secret in "".join(texts)], (pid, texts)


def assert_no_requests_pass(found: Any) -> None:
    codes = {name: set(answers.values()) for name, answers in found["answers"].items()}
    assert codes == {"itself": {403}, "nobody": {401}, "another": {401}}, found["answers"]
    assert found["own"] == 200


def assert_private(*directories: Path) -> None:
    """Check that nobody else can read directories and what is in them, but for copies of code.

    These keep the modes that the user gave them, below a directory of mode 0700.
    """
    for directory in directories:
        paths = [directory, *directory.rglob("*")]
        modes = {p: p.stat().st_mode for p in paths if p.parent.name != "context"}
        assert {"attempt.json", "context", "journal"} <= {path.name for path in modes}
        wide = {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077}
        assert not wide


def test_jobs_of_a_node_see_no_token_and_open_nothing_but_their_own_attempt(
    master: Any, make_node: Callable[..., Any], run_jobs: Callable[..., list[Any]]
) -> None:
    node = make_node("box", "--slots", "2").start(PACELINE_TOKEN=USER_TOKEN)
    attempts = node.directory / "attempts"
    found = run_jobs(master)
    secrets = {USER_TOKEN, node.token.read_text(), (master.home / "token").read_text().strip()}
    for one in found:
        assert_no_process_shows(one, secrets | tokens_of_attempts(attempts), above=node.process.pid)
        assert_no_requests_pass(one)
    assert_private(node.directory)


def test_jobs_on_the_machine_of_the_master_see_no_token_in_processes(
    make_master: Callable[..., Any], run_jobs: Callable[..., list[Any]]
) -> None:
    master = make_master(2, "own", server=None).start(PACELINE_TOKEN=USER_TOKEN)
    found = run_jobs(master)
    secrets = {USER_TOKEN, (master.home / "token").read_text().strip()}
    secrets |= tokens_of_attempts(master.home / "attempts")
    master_pid = json.loads((master.home / "master.json").read_text())["pid"]
    for one in found:
        assert_no_process_shows(one, secrets, above=master_pid)
    assert not stat.S_IMODE(master.home.stat().st_mode) & 0o077
    assert_private(master.home / "attempts")


class OtherUser:
    """Starts programs as another Unix user, for whom the interpreter is where it may be read."""

    def command(self, *command: str) -> list[str]:
        """Return a command that runs another one as that user."""
        user = f"setpriv --reuid={OTHER_UID} --regid={OTHER_UID} --clear-groups --"
        base = Path(sys.base_prefix).resolve()
        closed = [path for path in base.parents if not path.stat().st_mode & stat.S_IXOTH]
        mounts = ""
        if closed:
            # Of the closed directory, only the interpreter is there.
            mounts = (
                f"mount --bind {base} /mnt && mount -t tmpfs -o mode=755 tmpfs {closed[-1]}"
                f" && mkdir -p {base} && mount --bind /mnt {base} &&"
            )
        return ["unshare", "--mount", "sh", "-c", f'{mounts} exec {user} "$@"', "sh", *command]


def can_run_as_another_user() -> bool:
    """Tell whether the tests may become another user, who can read Paceline."""
    if os.geteuid() != 0:
        return False
    command = OtherUser().command(sys.executable, "-c", "import paceline")
    return subprocess.run(command, cwd="/", capture_output=True).returncode == 0


@pytest.fixture
def node_of_another_user(open_place: Path, make_master: Callable[..., Any]) -> Iterator[Any]:
    """Return a node that another Unix user has started, on the machine of its master."""
    if not can_run_as_another_user():
        pytest.skip("needs the right to become another user")
    master = make_master(0, str(open_place / "home")).start()
    directory = open_place / "box"
    directory.mkdir(mode=0o700)
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(master.client().create_token("box", scope="runner").secret)
    for path in (directory, token):
        os.chown(path, OTHER_UID, OTHER_UID)
    machine: Any = OtherUser()
    log_path = open_place / "box.log"
    node = NodeProcess(
        master, token, directory, "--slots", "2", machine=machine, log_path=log_path
    )  # fmt: skip
    yield node.start(PACELINE_TOKEN=USER_TOKEN, HOME=str(directory))
    node.close()


@pytest.mark.long
def test_jobs_of_another_user_cannot_read_the_home_of_the_master(
    node_of_another_user: Any, run_jobs: Callable[..., list[Any]]
) -> None:
    node = node_of_another_user
    for found in run_jobs(node.master, node.directory):
        assert found["uid"] == OTHER_UID
        assert set(found["home"].values()) == {"PermissionError"}, found["home"]
        assert_no_process_shows(found, {USER_TOKEN}, above=node.process.pid)
        assert_no_requests_pass(found)
    assert_private(node.directory / "attempts")


@pytest.fixture
def free_hard_links() -> Iterator[None]:
    """Let users make hard links to files that they cannot read, where this may be set."""
    setting = Path("/proc/sys/fs/protected_hardlinks")
    try:
        before = setting.read_text()
        setting.write_text("0")
    except OSError:
        # Then the job is not permitted to.
        yield
        return
    yield
    setting.write_text(before)


def files_in(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.usefixtures("free_hard_links")
def test_a_job_of_another_user_reaches_nothing_by_a_storage_that_it_shares_with_the_master(
    node_of_another_user: Any,
    open_place: Path,
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
) -> None:
    node = node_of_another_user
    master, home = node.master, node.master.home
    storage, private, found_path = (open_place / name for name in ("shared", "private", "found"))
    storage.mkdir()
    storage.chmod(0o777)
    found_path.touch()
    found_path.chmod(0o666)
    (private / "website").mkdir(parents=True)
    private.chmod(0o700)
    (private / "website" / "index.html").write_text("precious")
    (private / "website" / "manifest.json").write_text('{"name": "a web app"}')
    other = DirectoryStorage(private)
    with other.store_path("checkpoint") as path:
        (path / "link").write_text("the master's")
    other.commit("checkpoint", {"steps_completed": 1})
    secret = open_place / "secret"
    secret.touch(mode=0o600)
    secret.write_text("the secret of the master's user")
    kept = files_in(private)
    variables = {
        "URL": master.client().url, "MASTER_HOME": str(home), "STORAGE": str(storage),
        "PRIVATE": str(private), "SECRET": str(secret), "FOUND": str(found_path),
        "MASTER_PID": str(json.loads((home / "master.json").read_text())["pid"]),
    }  # fmt: skip
    rules = {"save_trial_best": 0, "save_trial_latest": 0}
    config: dict[str, Any] = {
        "entrypoint": "python3 train.py", "max_restarts": 0,
        "searcher": {"name": "single", "metric": "loss"},
        "environment": {"variables": variables},
        "checkpoint_storage": {"type": "directory", "path": str(storage)} | rules,
    }  # fmt: skip
    wait_until(lambda: master.client().slots())
    attack = master.client().create_experiment(config, write_context(ATTACK))
    wait_until(lambda: attack.reload().data.ended_at)
    logs = [line.text for trial in attack.trials() for line in trial.iter_logs()]
    assert attack.state.value == "COMPLETED", logs
    found = json.loads(found_path.read_text())
    assert (found.pop("uid"), found.pop("whole")) == (OTHER_UID, [200, "mine"])
    for text in (secret.read_text(), (home / "token").read_text().strip(), "the master's"):
        assert text not in str(found)
    assert {found.pop(f"forged {name}")[0] for name in ("website", "checkpoint")} == {200}
    assert {name: status for name, (status, _) in found.items() if status != 409} == {}
    # The next launch marks the storage again, and the retention of both experiments deletes.
    after = master.client().create_experiment(config, write_context(TRAIN, "after"))
    wait_until(lambda: after.reload().data.ended_at)
    assert after.state.value == "COMPLETED"
    for checkpoint in attack.checkpoints():
        if checkpoint.data.state.value == "COMPLETED":
            with pytest.raises(ApiError, match="409|must|not deleted"):
                checkpoint.delete()
    assert files_in(private) == kept
    assert sorted(os.listdir(private)) == ["checkpoint", "website"]
    assert secret.read_text() == "the secret of the master's user"
    assert "Traceback" not in (home / "master.log").read_text()
