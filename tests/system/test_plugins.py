"""A search method from a package of its own, from its installation to the end of its search."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
SCRIPT = """
import paceline as det

lr = det.get_cluster_info().trial.hparams["lr"]
with det.core.init() as context:
    for batch in range(1, 9):
        context.train.report_validation_metrics(batch, {"loss": lr})
        if context.preempt.should_preempt():
            break
"""
SEARCHER = {
    "name": "mean_stopping", "metric": "loss", "max_trials": 6, "max_concurrent_trials": 2,
    "max_time": 8, "min_time": 2, "min_others": 2,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "entrypoint": "python3 train.py", "searcher": SEARCHER, "max_restarts": 0,
    "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1}},
    "reproducibility": {"experiment_seed": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example beside the environment, and return the directory."""
    root = tmp_path_factory.mktemp("plugins")
    source = root / "source"
    source.mkdir()
    # A build leaves files beside its source.
    for path in PLUGINS.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--target", str(root / "site"), str(source)]
    subprocess.run(command, check=True)
    return root / "site"


@pytest.fixture(scope="module")
def plugin_server(installed: Path, fork_server_class: Any) -> Iterator[Any]:
    """Return a server of masters and commands that know of the packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
        server = fork_server_class(
            "paceline.cli._app", "paceline.client", "paceline._cluster.master.server"
        )
    yield server
    server.close()


def run_in(server: Any, home: Path, directory: Path, *arguments: object) -> Any:
    """Run a command to its end, forked from a server."""
    return server.run_to_end(
        "-m", "paceline.cli", *map(str, arguments),
        directory=directory, environment=os.environ | {"PACELINE_HOME": str(home)},
    )  # fmt: skip


@pytest.mark.long
def test_a_search_method_is_added_by_installing_a_package(
    installed: Path,
    plugin_server: Any,
    command_server: Any,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = write_context(SCRIPT)
    master, equipped = make_master(2), make_master(2, server=plugin_server)

    def create(searcher: dict[str, Any]) -> Any:
        """Create an experiment by the command line, whose process knows of the package too."""
        (code / "config.json").write_text(json.dumps(CONFIG | {"searcher": searcher}))
        is_installed = str(installed) in os.environ.get("PYTHONPATH", "")
        server = plugin_server if is_installed else command_server
        return run_in(server, master.home, code, "e", "create", "-f", code / "config.json", code)

    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
        client = equipped.start().client()
        done = create(SEARCHER)
        assert done.returncode == 0, done.stderr
        experiment = client.get_experiment(1)
        assert not experiment.data.has_rungs
        trials = list(experiment.trials())
        trained = {trial.hparams["lr"]: trial.reload().steps_completed for trial in trials}
        assert len(trained) == 6
        # The best one is never worse than the mean, and among six some are.
        assert trained[min(trained)] == 8
        stopped = [steps for steps in trained.values() if steps < 8]
        assert stopped
        assert min(stopped) >= 2
        # An error in a field of its own reads as in any other.
        done = create({**SEARCHER, "max_trails": 6})
        assert done.returncode != 0
        assert "`searcher.max_trails` is not a known field" in done.stderr
        assert "did you mean `max_trials`?" in done.stderr
        equipped.kill()
    # Without the package, what it has done stays visible.
    experiment = master.start().client().get_experiment(1)
    assert "search method" not in (master.home / "master.log").read_text()
    assert (experiment.data.searcher, experiment.state.value) == ("mean_stopping", "COMPLETED")
    assert len(list(experiment.trials())) == 6
    done = create(SEARCHER)
    assert done.returncode != 0
    assert "`searcher.name` is not known" in done.stderr
    assert "`adaptive_asha`" in done.stderr


# A quick one of a package that is there for a while alone is in test_failing_methods.py.
@pytest.mark.slow
def test_a_search_waits_for_its_package(
    installed: Path,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master that starts without it says so, loses nothing, and goes on once it is back."""
    code = write_context(SCRIPT.replace("    for", "    open('begun', 'w')\n    for", 1))
    master = make_master(1)
    (code / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "paceline.cli", "experiment", "create"]
    command += [str(code / "config.json"), str(code)]
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
        master.start()
        environment = os.environ | {"PACELINE_HOME": str(master.home)}
        subprocess.run(command, env=environment, check=True)
        wait_until(lambda: list(master.home.glob("attempts/*/context/begun")))
        master.kill()
    told = "cannot go on, as its search method `mean_stopping` is not installed"
    experiment = master.start().client().get_experiment(1)
    assert told in (master.home / "master.log").read_text()
    assert experiment.state.value in ("RUNNING", "QUEUED")
    master.kill()
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    experiment = master.start().client().get_experiment(1)
    assert experiment.wait().value == "COMPLETED", experiment.reload().data.error
    assert len(list(experiment.trials())) == 6


COUNTING = """
import os, signal
import paceline as det

info = det.get_cluster_info()
with det.core.init() as context:
    step = 0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            step = int((path / "step").read_text())
        print("restored", step, flush=True)
    while step < 6:
        step += 1
        context.train.report_validation_metrics(step, {"loss": 1.0 / step})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, uuid):
            (path / "step").write_text(str(step))
        if step == 3 and info.latest_checkpoint is None:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_storage_is_added_by_installing_a_package(
    installed: Path,
    plugin_server: Any,
    command_server: Any,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    code = write_context(COUNTING)
    url = f"sqlite://{tmp_path}/checkpoints.db"
    config = {
        "entrypoint": "python3 train.py", "max_restarts": 1, "checkpoint_storage": url,
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 6}},
    }  # fmt: skip
    (code / "config.json").write_text(json.dumps(config))
    master, equipped = make_master(1), make_master(1, server=plugin_server)

    def paceline(*arguments: object) -> Any:
        is_installed = str(installed) in os.environ.get("PYTHONPATH", "")
        server = plugin_server if is_installed else command_server
        return run_in(server, master.home, tmp_path, *arguments)

    # Without the package its URL is refused before anything runs.
    client = master.start().client()
    refused = paceline("e", "create", code / "config.json", code)
    assert refused.returncode != 0
    assert "checkpoint_storage" in refused.stderr
    master.kill()
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    client = equipped.start().client()
    done = paceline("e", "create", "-f", code / "config.json", code)
    assert done.returncode == 0, done.stdout + done.stderr
    [trial] = client.get_experiment(1).trials()
    assert "restored 3" in "\n".join(line.text for line in trial.iter_logs())

    def stored() -> list[Any]:
        return [c for c in trial.checkpoints() if c.data.state.value == "COMPLETED"]

    # All but the latest are removed after the end; what is left can be fetched, by a path or
    # through the master, and verified.
    wait_until(lambda: len(stored()) == 1)
    kept = stored()
    assert [c.data.storage for c in kept] == [url]
    kept[0].download(tmp_path / "copy")
    assert (tmp_path / "copy" / "step").read_text() == "6"
    storage = storage_in(installed, url)
    assert storage.list() == [kept[0].uuid]
    assert storage.verify(kept[0].uuid).metadata["steps_completed"] == 6
    # Runs without a master take the same URL.
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "train.py").write_text(
        "import torch; from paceline import core\n"
        f"with core.init(checkpoint_storage={url!r}) as context:\n"
        "    with context.checkpoint.store_path({'steps_completed': 1}, shard=True) as (path, _):\n"
        "        (path / 'a').touch()\n"
    )
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path / "local", check=True)
    assert len(storage.list()) == 2
    equipped.kill()

    # Without the package, all but the files is there, and what needs them names what is missing.
    path = os.environ["PYTHONPATH"].removeprefix(str(installed)).removeprefix(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", path)
    client = master.start().client()
    [own] = [uuid for uuid in storage.list() if uuid != kept[0].uuid]
    named = "no installed package offers sqlite://"
    runs = tmp_path / "local" / "paceline_runs"
    done = paceline("runs", "list", runs)
    assert (done.returncode, done.stderr) == (0, "")
    assert own[:8] in done.stdout
    [run] = runs.iterdir()
    done = paceline("runs", "show", run)
    assert (done.returncode, done.stderr) == (0, "")
    for command in [
        ("checkpoint", "export", "latest", "m.safetensors", "--run", run),
        ("checkpoint", "export", kept[0].uuid, "m.safetensors"),
        ("checkpoint", "download", kept[0].uuid),
        ("e", "create", code / "config.json", code),
    ]:
        done = paceline(*command)
        assert done.returncode == 1, (command, done)
        assert named in done.stderr, (command, done)
        assert "Traceback" not in done.stderr
    assert "Traceback" not in (master.home / "master.log").read_text()
    assert set(storage.list()) == {own, kept[0].uuid}


def storage_in(installed: Path, url: str) -> Any:
    """Return the storage of the installed package, which this process does not know."""
    spec = importlib.util.spec_from_file_location("sqlite_storage", installed / "sqlite_storage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SqliteStorage.from_url(url)


@pytest.mark.long
def test_an_executor_that_is_not_known_or_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test takes one by its name."""
    site = tmp_path / "site"
    facts = site / "noting-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: noting\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[paceline.executors]\nwrong = pathlib:Path\n")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    for executor, told in (
        ("other", "`executor` must be local, wrong, but got 'other'"),
        ("wrong", "must be a class of `Executor`"),
        ("slurm", "(`starter: slurm`) and use `paceline up --pool-file FILE`"),
    ):
        command = [sys.executable, "-m", "paceline.cli", "up", "--port", "0"]
        command += ["--slots", "1", "--executor", executor]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stdout
        assert told in done.stdout + done.stderr


# It stands at step 4 until it may go on.
WAITING = COUNTING.replace("import os, signal", "import os, signal, time").replace(
    "        step += 1",
    "        while step == 4 and not os.path.exists(os.environ['GO_ON']):\n"
    "            time.sleep(0.05)\n        step += 1",
)


def offer_executor(site: Path, name: str, kind: str, code: str) -> None:
    """Install a package whose module has an executor."""
    facts = site / f"{name}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    point = f"{name} = {name}_executor:{kind}\n"
    (facts / "entry_points.txt").write_text(f"[paceline.executors]\n{point}")
    (site / f"{name}_executor.py").write_text(code)


@pytest.mark.long
def test_the_executor_of_the_guide_starts_and_finds_its_runners(
    tmp_path: Path,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    [shown] = [part for part in guide.split("```python\n") if "NiceExecutor" in part]
    offer_executor(tmp_path / "site", "nice", "NiceExecutor", shown.partition("```")[0])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    code = write_context("import os\nprint('nice', os.nice(0))\n" + WAITING)
    config = {
        "entrypoint": "python3 train.py", "max_restarts": 1,
        "checkpoint_storage": str(tmp_path / "checkpoints"),
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 6}},
        "environment": {"environment_variables": [f"GO_ON={tmp_path}/go_on"]},
    }  # fmt: skip
    master = make_master(1, "home", "--executor", "nice")
    experiment = master.start().client().create_experiment(config, code)
    [trial] = experiment.trials()
    wait_until(lambda: trial.reload().steps_completed == 4)
    master.kill()
    experiment = master.start().client().get_experiment(experiment.id)
    [trial] = experiment.trials()
    (pid,) = {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(master.home / "attempts") in " ".join(process.info["cmdline"] or [])
    }
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "go_on").touch()
    assert experiment.wait().value == "COMPLETED", experiment.reload().data.error
    assert [row.steps_completed for row in trial.iter_metrics("validation")] == [1, 2, 3, 4, 5, 6]
    assert [line.text for line in trial.iter_logs() if "nice" in line.text] == ["nice 10"] * 2
    log = (master.home / "master.log").read_text()
    assert log.count("The runner of attempt") >= 2
    wait_until(lambda: not [p for p in (master.home / "attempts").iterdir() if p.is_dir()])


ELSEWHERE = """
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from paceline.journal import RunDirectory
from paceline._cluster.master.executors import AttemptStatus, Executor
from paceline._cluster.runner.attempt_directory import AttemptDirectory

class ElsewhereExecutor(Executor):
    \"\"\"Starts runners that do not see the master's home.\"\"\"

    @classmethod
    def make(cls, place):
        executor = cls()
        executor.root = Path(os.environ["ELSEWHERE"])
        executor.root.mkdir(exist_ok=True)
        executor.children = {}
        executor.address = executor.root / "master.json"
        executor.address.write_bytes(msgspec.json.encode(place.master))
        (executor.root / "devices").write_text(" ".join(place.devices))
        return executor

    def directory(self, attempt_id):
        return AttemptDirectory(self.root / str(attempt_id))

    def start(self, launch):
        spec = msgspec.structs.replace(launch.spec, master=str(self.address))
        directory = AttemptDirectory.create(self.directory(spec.attempt_id).path, spec)
        RunDirectory.create(directory.run.path, launch.info)
        self.spawn(spec.attempt_id)

    def spawn(self, attempt_id, *options):
        directory = str(self.directory(attempt_id).path)
        command = [sys.executable, "-m", "paceline._cluster.runner", directory]
        environment = {k: v for k, v in os.environ.items() if k != "PACELINE_HOME"}
        self.children[attempt_id] = subprocess.Popen(
            [*command, *options], cwd=self.root, env=environment, start_new_session=True
        )

    def status(self, attempt_id):
        child = self.children.get(attempt_id)
        if child is not None and child.poll() is None:
            return AttemptStatus.ALIVE
        directory = self.directory(attempt_id)
        if directory.runner_pid() is not None:
            return AttemptStatus.ALIVE
        return AttemptStatus.GONE if directory.was_started else AttemptStatus.NOT_STARTED

    def ship(self, attempt_id):
        self.spawn(attempt_id, "--ship")

    def kill_runner(self, attempt_id):
        os.kill(self.directory(attempt_id).runner_pid(), signal.SIGKILL)

    def clean(self, keep):
        pass
"""


@pytest.mark.long
def test_a_runner_needs_no_more_of_its_master_than_it_is_handed(
    tmp_path: Path,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An executor hands address and token on; code and records go by HTTP, also to the next one."""
    site, elsewhere = tmp_path / "site", tmp_path / "home_elsewhere"
    offer_executor(site, "elsewhere", "ElsewhereExecutor", ELSEWHERE)
    code = write_context(WAITING)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    monkeypatch.setenv("ELSEWHERE", str(elsewhere))
    config = {
        "entrypoint": "python3 train.py", "max_restarts": 1,
        "checkpoint_storage": str(tmp_path / "checkpoints"),
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 6}},
        "environment": {"environment_variables": [f"GO_ON={tmp_path}/go_on"]},
    }  # fmt: skip
    (code / "config.json").write_text(json.dumps(config))
    master = make_master(1, "home", "--executor", "elsewhere")
    client = master.start().client()
    monkeypatch.setenv("PACELINE_HOME", str(master.home))
    command = [sys.executable, "-m", "paceline.cli", "e", "create"]
    subprocess.run([*command, str(code / "config.json"), str(code)], check=True)
    [trial] = client.get_experiment(1).trials()
    wait_until(lambda: trial.reload().steps_completed == 4)
    first = (elsewhere / "master.json").read_text()
    master.kill()
    client = master.start().client()
    assert (elsewhere / "master.json").read_text() != first
    (tmp_path / "go_on").touch()
    experiment = client.get_experiment(1)
    assert experiment.wait().value == "COMPLETED", experiment.reload().data.error
    [trial] = experiment.trials()
    assert [row.steps_completed for row in trial.iter_metrics("validation")] == [1, 2, 3, 4, 5, 6]
    assert "restored 3" in "\n".join(line.text for line in trial.iter_logs())
    assert (elsewhere / "devices").read_text() == "cpu"
    assert not list((master.home / "attempts").iterdir())
    for name in ("attempt.json", "run/run.json"):
        for path in elsewhere.glob(f"*/{name}"):
            assert f"{master.home}/" not in path.read_text()
