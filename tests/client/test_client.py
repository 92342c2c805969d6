"""The SDK against a real master."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline.client as sdk
from paceline._cluster.messages.states import ExperimentState
from paceline.client import (
    ApiError,
    Client,
    DownloadError,
    Experiment,
    MasterUnreachableError,
    NoCheckpointError,
)
from paceline.client._http_session import HttpSession, read_master_file

TRAIN = """
import sys, time, paceline
with paceline.core.init() as context:
    info = paceline.get_cluster_info()
    data, lr = info.trial.config["data"], info.trial.hparams["lr"]
    # It follows the checkpoints that are stored.
    is_first = context.latest_checkpoint is None
    for step in range(1, data.get("steps", 3) + 1):
        context.train.report_training_metrics(step, {"train_loss": float("inf"), "lr": lr})
        context.train.report_validation_metrics(step, {"loss": lr * step})
        print(f"step {step}", flush=True)
        if step == 2:
            print("WARNING: halfway", file=sys.stderr, flush=True)
        if data.get("stores", True):
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "sub").mkdir()
                (path / "sub" / "state.txt").write_text(f"{step}")
        # The first attempt may be held until it is told to leave.
        while step == data.get("held_at") and is_first:
            if context.preempt.should_preempt():
                break
            time.sleep(0.05)
        if context.preempt.should_preempt():
            break
        time.sleep(data.get("pause_s", 0))
"""


def config(**fields: Any) -> dict[str, Any]:
    return {
        "name": "sdk",
        "entrypoint": "python3 train.py",
        "hyperparameters": {"lr": 0.5},
        "searcher": {"name": "single", "metric": "loss"},
        "max_restarts": 0,
        **fields,
    }


GRID = {
    "hyperparameters": {"lr": {"type": "categorical", "vals": [3.0, 1.0, 2.0]}},
    "searcher": {"name": "grid", "metric": "loss"},
}


def start_master(server: Any, home: Path) -> Any:
    return server.start_master(home, "--port", 0, "--slots", 2)


def stop_master(home: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "paceline.cli", "down", "--timeout", "1", "--home", str(home)],
        check=True,
        timeout=240,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def master_home(tmp_path_factory: pytest.TempPathFactory, master_server: Any) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("home")
    start_master(master_server, home)
    yield home
    stop_master(home)


@pytest.fixture
def client(master_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("PACELINE_HOME", str(master_home))
    monkeypatch.delenv("PACELINE_MASTER", raising=False)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    with Client() as client:
        yield client


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "code"
    path.mkdir()
    (path / "train.py").write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def finished(
    master_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Client, int]]:
    """Give a grid of three trials that has ended."""
    path = tmp_path_factory.mktemp("code")
    (path / "train.py").write_text(TRAIN)
    file = read_master_file(master_home)
    assert file is not None
    with Client(file.url, (master_home / "token").read_text().strip()) as client:
        experiment = client.create_experiment(config(**GRID), path)
        assert experiment.wait() is ExperimentState.COMPLETED
        yield client, experiment.id


def test_an_experiment_that_has_ended_tells_all_about_itself(
    finished: tuple[Client, int],
) -> None:
    client, number = finished
    experiment = client.get_experiment(number)
    assert (experiment.name, experiment.metric, experiment.progress) == ("sdk", "loss", 1.0)
    assert experiment.best_metric == 1.0
    assert experiment.smaller_is_better
    assert experiment.config["hyperparameters"] == GRID["hyperparameters"]
    assert [t.hparams["lr"] for t in experiment.trials(sort_by="metric")] == [1.0, 2.0, 3.0]
    assert len(experiment.trials(limit=2)) == 2
    assert experiment.search().brackets == []
    assert number in [e.id for e in client.list_experiments(state="COMPLETED")]
    assert repr(experiment) == f"Experiment(id={number}, name='sdk', state=COMPLETED)"


def test_a_trial_gives_its_metrics_and_lines(finished: tuple[Client, int]) -> None:
    client, number = finished
    trial = client.get_experiment(number).trials(sort_by="metric")[0].reload()
    validation = list(trial.iter_metrics("validation"))
    assert [(r.steps_completed, r.metrics) for r in validation] == [
        (step, {"loss": 1.0 * step}) for step in (1, 2, 3)
    ]
    training = list(trial.iter_metrics("training"))
    assert training[0].metrics == {"train_loss": float("inf"), "lr": 1.0}
    assert len(list(trial.iter_metrics())) == 6
    assert [line.text for line in trial.iter_logs(stream="stdout")] == [
        "step 1",
        "step 2",
        "step 3",
    ]
    assert [line.text for line in trial.iter_logs(level="WARNING")] == ["WARNING: halfway"]
    [last] = trial.iter_logs(tail=1, stream="stdout", follow=True)
    assert last.text == "step 3"
    assert list(trial.iter_logs(after=last.id, stream="stdout")) == []
    assert trial.data.summary["validation"]["loss"].count == 3
    assert trial.experiment().id == number


def test_lines_of_all_trials_come_in_the_order_of_time(finished: tuple[Client, int]) -> None:
    client, number = finished
    lines = list(client.get_experiment(number).iter_logs())
    assert len(lines) == 12
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    assert len(list(client.get_experiment(number).iter_logs(tail=5))) == 5


def test_checkpoints_are_found_and_downloaded(
    finished: tuple[Client, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, number = finished
    best = client.get_experiment(number).top_checkpoint()
    assert (best.metric, best.metadata, best.steps_completed) == (1.0, {"steps_completed": 1}, 1)
    trial = client.get_trial(best.trial_id)
    assert trial.top_checkpoint().uuid == best.uuid
    for mode in ("auto", "direct", "master"):
        path = best.download(tmp_path / mode, mode=mode)  # type: ignore[arg-type]
        assert (path / "sub" / "state.txt").read_text() == "1"
    monkeypatch.chdir(tmp_path)
    assert best.download() == Path("checkpoints") / best.uuid
    with pytest.raises(DownloadError, match=r"`path` must be a new or empty directory"):
        best.download()
    with pytest.raises(ValueError, match="`mode` must be auto, direct or master, but got 'ftp'"):
        best.download("x", mode="ftp")  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_refused_by_name_and_leaves_nothing(
    client: Client, code: Path, tmp_path: Path
) -> None:
    experiment = client.create_experiment(config(), code)
    experiment.wait()
    checkpoint = experiment.top_checkpoint()
    damaged = Path(checkpoint.data.storage) / checkpoint.uuid / "sub" / "state.txt"
    damaged.write_text("X")
    for mode in ("direct", "master"):
        with pytest.raises((DownloadError, ApiError), match=r"sub/state\.txt"):
            checkpoint.download(tmp_path / "target", mode=mode)  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir() if "target" in p.name] == []


def test_deleting_a_checkpoint_removes_its_files(client: Client, code: Path) -> None:
    experiment = client.create_experiment(config(), code)
    experiment.wait()
    checkpoint = experiment.top_checkpoint()
    files = Path(checkpoint.data.storage) / checkpoint.uuid
    assert files.is_dir()
    checkpoint.delete(["*.none"])
    assert checkpoint.reload().state.value == "COMPLETED"
    with pytest.raises(TypeError, match=r"must be a list of patterns, but got 'sub/\*'"):
        checkpoint.delete("sub/*")
    checkpoint.delete()
    assert not files.exists()
    assert checkpoint.reload().state.value == "DELETED"


def test_without_a_checkpoint_the_error_says_so(client: Client, code: Path) -> None:
    experiment = client.create_experiment(config(data={"stores": False}), code)
    experiment.wait()
    with pytest.raises(NoCheckpointError, match=f"Experiment {experiment.id} must have a check"):
        experiment.top_checkpoint()
    with pytest.raises(NoCheckpointError, match="must have a checkpoint, but has none"):
        experiment.trials()[0].top_checkpoint()


def wait_for_report(experiment: Experiment) -> None:
    for event in experiment.events(after=0):
        if event is not None and event.kind == "validation":
            return


def test_pausing_activating_and_waiting(client: Client, code: Path) -> None:
    experiment = client.create_experiment(config(data={"steps": 3, "held_at": 2}), code)
    wait_for_report(experiment)
    assert experiment.reload().state.value == "RUNNING"
    assert experiment.pause().state is ExperimentState.PAUSED
    # Its trial stores a checkpoint and leaves, and is then paused too.
    while (trial := experiment.trials()[0]).data.is_running:
        assert trial.state.value == "STOPPING"
        time.sleep(0.05)
    assert (trial.state.value, trial.data.state.value) == ("PAUSED", "ACTIVE")
    assert repr(trial) == f"Trial(id={trial.id}, state=PAUSED)"
    assert "STOPPING" not in (experiment.state.value, trial.reload().state.value)
    with pytest.raises(ValueError, match="must be running to wait for it, but is paused"):
        experiment.wait()
    experiment.activate()
    assert experiment.wait(0.2) is ExperimentState.COMPLETED
    assert experiment.trials()[0].reload().data.num_attempts == 2


@pytest.mark.parametrize("command", ["cancel", "kill"])
def test_ending_an_experiment(client: Client, code: Path, command: str) -> None:
    experiment = client.create_experiment(config(data={"steps": 500, "pause_s": 0.2}), code)
    wait_for_report(experiment)
    getattr(experiment, command)()
    assert experiment.wait(0.2) is ExperimentState.CANCELED


def test_killing_a_trial_ends_it_alone(client: Client, code: Path) -> None:
    experiment = client.create_experiment(config(data={"steps": 500, "pause_s": 0.2}), code)
    wait_for_report(experiment)
    experiment.trials()[0].kill()
    experiment.wait(0.2)
    assert experiment.trials()[0].state.is_terminal


def test_a_trial_continues_in_a_new_experiment(client: Client, code: Path) -> None:
    first = client.create_experiment(config(), code)
    first.wait()
    trial = first.trials()[0]
    second = trial.continue_({"name": "more"}, activate=False)
    assert (second.state, second.name) == (ExperimentState.PAUSED, "more")
    assert second.data.parent_trial_id == trial.id
    second.kill()


def test_functions_use_the_master_of_the_environment(client: Client, code: Path) -> None:
    experiment = sdk.create_experiment(config(), code, activate=False)
    assert sdk.experiment(experiment.id).state is ExperimentState.PAUSED
    experiment.activate()
    experiment.wait()
    trial = sdk.trial(experiment.trials()[0].id)
    assert trial.steps_completed == 3
    assert sdk.checkpoint(trial.checkpoints()[0].uuid).trial_id == trial.id
    assert sdk.list_experiments(limit=1)[0].id == experiment.id


def test_overrides_and_the_submitted_text(client: Client, code: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "# mine\nentrypoint: python3 train.py\nsearcher: {name: single, metric: loss}\n"
    )
    experiment = client.create_experiment(
        path, code, False, overrides=["name=other", "searcher.max_length=7"]
    )
    assert experiment.name == "other"
    assert experiment.config["searcher"]["max_length"] == 7
    experiment.kill()


def test_preview_master_and_slots(client: Client) -> None:
    preview = client.preview_search(config(**GRID))
    assert [(row.num_trials, row.length) for row in preview.rows] == [(3, None)]
    assert client.master().num_slots == 2
    assert [slot.id for slot in client.slots()] == [0, 1]


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda client: client.get_experiment(10_000), 404),
        (lambda client: client.get_trial(10_000), 404),
        (lambda client: client.get_checkpoint("no-such"), 404),
        (lambda client: client.list_experiments(state="NOWHERE"), 422),
    ],
)
def test_refusals_carry_status_code_and_detail(client: Client, call: Any, status: int) -> None:
    with pytest.raises(ApiError, match=r"\w+ ") as caught:
        call(client)
    assert caught.value.status == status
    assert caught.value.code
    assert caught.value.detail == str(caught.value)


def test_a_wrong_token_is_refused(master_home: Path) -> None:
    file = read_master_file(master_home)
    assert file is not None
    with Client(file.url, "wrong") as client, pytest.raises(ApiError) as caught:
        client.master()
    assert caught.value.status == 401


@pytest.mark.long
def test_events_and_waiting_survive_a_killed_master_that_comes_back_elsewhere(
    home: Path, code: Path, master_server: Any
) -> None:
    master = start_master(master_server, home)
    try:
        with Client() as client:
            fields = config(data={"steps": 25, "pause_s": 0.2})
            experiment = client.create_experiment(fields, code)
            steps, is_killed = [], False
            for event in client.events(after=0, experiment_id=experiment.id):
                if event.kind == "validation":
                    steps.append(event.data["steps_completed"])
                if event.kind == "validation" and not is_killed:
                    is_killed = True
                    file = read_master_file(home)
                    assert file is not None
                    assert file.pid == master.pid
                    master.kill()
                    master.wait()
                    with pytest.raises(MasterUnreachableError, match="paceline up --detach"):
                        HttpSession(file.url, "x").get("master", dict)
                    start_master(master_server, home)
                if event.kind == "experiment_state" and event.data["state"] == "COMPLETED":
                    break
            assert steps == list(range(1, 26))
            assert experiment.wait() is ExperimentState.COMPLETED
    finally:
        stop_master(home)
