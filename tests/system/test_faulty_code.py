"""What happens to experiments whose code or configuration misbehaves."""

import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.client import ApiError, Client, Experiment
from paceline.config import ConfigError


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, master_class: Any) -> Iterator[Client]:
    """A client of one master with two slots that all tests of this file share."""
    master = master_class(tmp_path_factory.mktemp("shared") / "home", 2).start()
    yield master.client()
    master.close()


@pytest.fixture
def create(client: Client, tmp_path: Path) -> Callable[..., Experiment]:
    """Return a function that creates an experiment of one script."""

    def create(script: str, **changes: Any) -> Experiment:
        context = tmp_path / "context"
        context.mkdir(exist_ok=True)
        (context / "train.py").write_text(textwrap.dedent(script))
        config: dict[str, Any] = {
            "name": "faulty",
            "entrypoint": "python3 train.py",
            "searcher": {"name": "single", "metric": "loss"},
            "max_restarts": 0,
        }
        return client.create_experiment(config | changes, context)

    return create


def ended(experiment: Experiment) -> Any:
    """Wait for an experiment's end and return its data."""
    # Some start a hundred processes, one after the other.
    deadline = time.monotonic() + 300
    while not experiment.reload().state.is_terminal:
        assert time.monotonic() < deadline, experiment.data
        time.sleep(0.2)
    return experiment.data


def only_trial(experiment: Experiment) -> Any:
    (trial,) = experiment.trials()
    return trial.reload()


def texts(experiment: Experiment) -> list[str]:
    return [line.text for line in experiment.iter_logs()]


HALVING = {
    "name": "async_halving",
    "metric": "loss",
    "num_rungs": 2,
    "max_trials": 4,
    "max_concurrent_trials": 2,
    "time_metric": "epochs",
    "max_time": 4,
    "divisor": 2,
}
SPACE = {"lr": {"type": "double", "minval": 0, "maxval": 1}}


@pytest.mark.long
def test_failing_script_is_restarted_and_then_fails_with_its_traceback_in_the_logs(
    create: Callable[..., Experiment],
) -> None:
    """Each attempt exits with a code of its own, as the same failure again would be the last."""
    script = """
        import sys, traceback
        from pathlib import Path
        try:
            raise RuntimeError("no such luck")
        except RuntimeError:
            traceback.print_exc()
        attempt = int(Path.cwd().parent.name)
        sys.exit(1 + attempt % 100)
    """
    experiment = create(script, max_restarts=2)
    data = ended(experiment)
    trial = only_trial(experiment)
    assert data.state.value == "ERROR"
    assert (trial.data.num_attempts, trial.data.restarts) == (3, 2)
    assert "max_restarts is 2" in trial.data.error
    assert f"exit code {trial.data.attempts[-1].exit.code}" in data.error
    lines = texts(experiment)
    assert lines.count("RuntimeError: no such luck") == 3
    assert any("restart 1 of 2 follows" in line for line in lines)
    errors = [line.text for line in trial.iter_logs(level="ERROR")]
    assert "Traceback (most recent call last):" in errors


def test_script_that_fails_at_once_is_not_started_for_ever(
    create: Callable[..., Experiment],
) -> None:
    experiment = create("import nothing_of_this_name", max_restarts=5)
    assert ended(experiment).state.value == "ERROR"
    trial = only_trial(experiment)
    assert (trial.data.num_attempts, trial.data.restarts) == (2, 1)
    assert "the same way as the one before, with no checkpoint in between" in trial.data.error


def test_restart_continues_from_the_latest_checkpoint_and_supersedes_what_came_after_it(
    create: Callable[..., Experiment],
) -> None:
    script = """
        import paceline as det
        info = det.get_cluster_info()
        with det.core.init() as context:
            start = 0
            if info.latest_checkpoint:
                with context.checkpoint.restore_path(info.latest_checkpoint) as path:
                    start = int((path / "step").read_text())
            for step in range(start + 1, 7):
                value = step + (100.0 if start == 0 else 0.0)
                context.train.report_validation_metrics(step, {"loss": value})
                if step == 3:
                    with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                        (path / "step").write_text(str(step))
                if step == 5 and start == 0:
                    raise SystemExit(7)
    """
    experiment = create(script, max_restarts=1)
    assert ended(experiment).state.value == "COMPLETED"
    trial = only_trial(experiment)
    rows = {row.steps_completed: row.metrics["loss"] for row in trial.iter_metrics("validation")}
    assert rows == {1: 101.0, 2: 102.0, 3: 103.0, 4: 4.0, 5: 5.0, 6: 6.0}
    assert (trial.data.best_metric, trial.data.best_step) == (4.0, 4)
    assert trial.data.summary["validation"]["loss"].count == 6
    first, second = trial.data.attempts
    assert (first.exit.code, second.resumed_steps, second.exit.outcome) == (7, 3, "completed")


def test_script_that_raises_invalid_hp_is_replaced_and_is_no_failure(
    create: Callable[..., Experiment],
) -> None:
    script = """
        import paceline as det
        lr = det.get_cluster_info().trial.hparams["lr"]
        with det.core.init() as context:
            if lr > 0.5:
                raise det.InvalidHP("too large")
            context.train.report_validation_metrics(1, {"loss": lr})
    """
    search = {"name": "random", "metric": "loss", "max_trials": 3, "max_concurrent_trials": 2}
    experiment = create(
        script,
        hyperparameters=SPACE,
        searcher=search,
        reproducibility={"experiment_seed": 3},
    )
    assert ended(experiment).state.value == "COMPLETED"
    trials = experiment.trials()
    invalid = [t for t in trials if t.data.stop_reason == "invalid_hp"]
    assert invalid
    assert all(t.hparams["lr"] > 0.5 for t in invalid)
    assert len(trials) - len(invalid) == 3
    assert all(t.state.value == "COMPLETED" and t.data.restarts == 0 for t in trials)


def test_halving_search_whose_metric_is_never_reported_fails_and_names_it(
    create: Callable[..., Experiment],
) -> None:
    script = """
        import paceline as det
        with det.core.init() as context:
            context.train.report_validation_metrics(1, {"test_loss": 1.0, "epochs": 1})
    """
    experiment = create(script, hyperparameters=SPACE, searcher=HALVING)
    data = ended(experiment)
    assert data.state.value == "ERROR"
    assert "needs `loss` in the validation metrics" in data.error
    assert "reported: epochs, test_loss" in data.error


def test_halving_search_whose_time_metric_is_never_reported_fails_and_names_it(
    create: Callable[..., Experiment],
) -> None:
    script = """
        import paceline as det
        with det.core.init() as context:
            context.train.report_validation_metrics(1, {"loss": 1.0})
    """
    data = ended(create(script, hyperparameters=SPACE, searcher=HALVING))
    assert data.state.value == "ERROR"
    assert "needs `epochs` in the validation metrics" in data.error


def test_single_search_completes_when_its_metric_is_not_the_one_reported(
    create: Callable[..., Experiment],
) -> None:
    script = """
        import paceline as det
        with det.core.init() as context:
            context.train.report_validation_metrics(1, {"test_loss": 1.0})
    """
    experiment = create(script)
    assert ended(experiment).state.value == "COMPLETED"
    assert any("`loss`" in line for line in texts(experiment))


def test_nan_as_the_searched_metric_ranks_worst_and_is_never_best(
    create: Callable[..., Experiment],
) -> None:
    script = """
        import time
        import paceline as det
        info = det.get_cluster_info()
        with det.core.init() as context:
            for epoch in range(1, 5):
                loss = float("nan") if info.trial.hparams["lr"] > 0.5 else 1.0 / epoch
                context.train.report_validation_metrics(epoch, {"loss": loss, "epochs": epoch})
                time.sleep(0.1)
                if context.preempt.should_preempt():
                    break
    """
    experiment = create(
        script,
        hyperparameters=SPACE,
        searcher=HALVING | {"max_trials": 6},
        reproducibility={"experiment_seed": 3},
    )
    data = ended(experiment)
    assert data.state.value == "COMPLETED"
    bad = [t for t in experiment.trials() if t.hparams["lr"] > 0.5]
    assert bad
    assert all(t.best_metric is None for t in bad)
    assert data.best_metric == 0.25


def test_stop_ends_a_trial_that_ignores_it_after_the_stop_timeout(
    create: Callable[..., Experiment],
) -> None:
    script = """
        import time
        import paceline as det
        info = det.get_cluster_info()
        with det.core.init() as context:
            context.train.report_validation_metrics(1, {"loss": 1.0, "epochs": 4})
            time.sleep(600)
    """
    search = HALVING | {"max_trials": 2, "stop_timeout": 0.5}
    experiment = create(script, hyperparameters=SPACE, searcher=search)
    assert ended(experiment).state.value == "COMPLETED"
    exits = [t.reload().data.attempts[-1].exit for t in experiment.trials()]
    assert [e.reason.value for e in exits] == ["preemption_timeout"] * 2


def test_trial_that_works_by_operations_gets_its_rungs_and_is_decided_on_what_it_completes(
    create: Callable[..., Experiment],
) -> None:
    script = """
        import paceline as det
        info = det.get_cluster_info()
        with det.core.init() as context:
            trained = 0
            for operation in context.searcher.operations():
                while trained < operation.length:
                    trained += 1
                    operation.report_progress(trained)
                print("trained to", trained, flush=True)
                operation.report_completed(info.trial.hparams["lr"])
    """
    experiment = create(
        script,
        hyperparameters=SPACE,
        searcher=HALVING | {"max_concurrent_trials": 1, "max_trials": 4},
        reproducibility={"experiment_seed": 6},
    )
    assert ended(experiment).state.value == "COMPLETED"
    (bracket,) = experiment.search().brackets
    assert [rung.length for rung in bracket] == [2, 4]
    assert len(bracket[0].entries) == 4
    lengths = {}
    for trial in experiment.trials():
        said = [line.text for line in trial.iter_logs() if line.text.startswith("trained to")]
        lengths[trial.id] = said
    reached = {entry.trial_id for entry in bracket[1].entries}
    for trial_id, said in lengths.items():
        assert said == ["trained to 2"] + ["trained to 4"] * (trial_id in reached)
    assert 0 < len(reached) < 4


def test_paused_experiment_resumes_from_its_checkpoint(
    create: Callable[..., Experiment], wait_until: Callable[..., None]
) -> None:
    script = """
        import time
        import paceline as det
        info = det.get_cluster_info()
        with det.core.init() as context:
            step = 0
            if info.latest_checkpoint:
                with context.checkpoint.restore_path(info.latest_checkpoint) as path:
                    step = int((path / "step").read_text())
            while step < 30:
                step += 1
                time.sleep(0.05)
                context.train.report_training_metrics(step, {"pid": 1})
                if step % 5 == 0:
                    with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                        (path / "step").write_text(str(step))
                    # The first attempt goes no further until it is told to leave.
                    while step == 25 and not info.latest_checkpoint:
                        if context.preempt.should_preempt():
                            break
                        time.sleep(0.02)
                    if context.preempt.should_preempt():
                        break
    """
    experiment = create(script)
    wait_until(lambda: only_trial(experiment).data.latest_checkpoint)
    experiment.pause()
    wait_until(lambda: only_trial(experiment).data.attempts[0].exit)
    assert experiment.reload().state.value == "PAUSED"
    paused_at = only_trial(experiment).steps_completed
    assert paused_at < 30
    experiment.activate()
    assert ended(experiment).state.value == "COMPLETED"
    trial = only_trial(experiment)
    assert [a.exit.outcome for a in trial.data.attempts] == ["preempted", "completed"]
    assert trial.data.attempts[1].resumed_steps % 5 == 0
    steps = [row.steps_completed for row in trial.iter_metrics("training")]
    assert steps == list(range(1, 31))


LONG = """
    import time
    import paceline as det
    with det.core.init() as context:
        for step in range(1, 20_000):
            time.sleep(0.02)
            if context.preempt.should_preempt():
                with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                    (path / "x").write_text("x")
                break
"""


def test_cancel_lets_the_trial_checkpoint_and_kill_does_not_wait(
    create: Callable[..., Experiment], wait_until: Callable[..., None]
) -> None:
    canceled, killed = create(LONG), create(LONG)
    wait_until(lambda: only_trial(canceled).data.is_running)
    wait_until(lambda: only_trial(killed).data.is_running)
    time.sleep(1)
    canceled.cancel()
    killed.kill()
    assert ended(canceled).state.value == "CANCELED"
    assert ended(killed).state.value == "CANCELED"
    assert only_trial(canceled).data.latest_checkpoint is not None
    assert only_trial(killed).data.attempts[0].exit.reason.value == "killed"


def test_continued_trial_is_another_trial_that_starts_from_the_checkpoint(
    client: Client, create: Callable[..., Experiment]
) -> None:
    script = """
        import paceline as det
        info = det.get_cluster_info()
        with det.core.init() as context:
            before = None
            if info.latest_checkpoint:
                with context.checkpoint.restore_path(info.latest_checkpoint) as path:
                    before = (path / "trial").read_text()
            print("before:", before, flush=True)
            context.train.report_validation_metrics(1, {"loss": info.trial.hparams["lr"]})
            with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
                (path / "trial").write_text(str(info.trial.trial_id))
    """
    first = create(script, hyperparameters=SPACE)
    ended(first)
    trial = only_trial(first)
    second = trial.continue_()
    assert ended(second).state.value == "COMPLETED"
    other = only_trial(second)
    assert other.id != trial.id
    assert other.hparams == trial.hparams
    assert f"before: {trial.id}" in texts(second)


def test_ended_single_experiment_goes_on_with_the_same_trial(
    create: Callable[..., Experiment],
) -> None:
    script = """
        import paceline as det
        info = det.get_cluster_info()
        with det.core.init() as context:
            start = info.trial.hparams["from"] if not info.latest_checkpoint else 1
            context.train.report_validation_metrics(start + 1, {"loss": 0.5})
            with context.checkpoint.store_path({"steps_completed": start + 1}) as (path, _):
                (path / "x").write_text("x")
    """
    experiment = create(script, hyperparameters={"from": 0})
    ended(experiment)
    experiment.continue_()
    assert ended(experiment).state.value == "COMPLETED"
    trial = only_trial(experiment)
    assert trial.data.num_attempts == 2
    assert [row.steps_completed for row in trial.iter_metrics("validation")] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entrypoint": None}, "entrypoint"),
        ({"searcher": {"name": "single", "metrik": "loss"}}, "metrik.*did you mean"),
        ({"hyperparameters": {"x": {"type": "int", "minval": 3, "maxval": 1}}}, "minval"),
        (
            {"searcher": {"name": "grid", "metric": "loss"}, "hyperparameters": SPACE},
            "count",
        ),
        ({"max_restart": 2}, "max_restart"),
    ],
)
def test_wrong_config_is_refused_with_its_path_before_it_is_sent(
    client: Client, changes: dict[str, Any], message: str
) -> None:
    config = {
        "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "loss"},
    } | changes
    with pytest.raises(ConfigError, match=f"(?is){message}"):
        client.create_experiment(config)


def test_more_slots_than_there_are_is_refused(create: Callable[..., Experiment]) -> None:
    with pytest.raises(ApiError, match="at most 2, the slots of this master, but got 3"):
        create("pass", resources={"slots_per_trial": 3})


def test_entrypoint_takes_hyperparameters_as_arguments(create: Callable[..., Experiment]) -> None:
    experiment = create(
        "import sys; print(sys.argv[1:], flush=True)",
        entrypoint="python3 train.py --lr ${hparams.lr} --name ${hparams.name}",
        hyperparameters={"lr": 0.25, "name": "it's"},
    )
    assert ended(experiment).state.value == "COMPLETED"
    assert """['--lr', '0.25', '--name', "it's"]""" in texts(experiment)


def test_unusable_interpreter_fails_the_trial_and_says_why(
    create: Callable[..., Experiment],
) -> None:
    experiment = create("pass", environment={"python": "/nonexistent/python"})
    assert ended(experiment).state.value == "ERROR"
    assert "/nonexistent/python" in only_trial(experiment).data.error


@pytest.mark.slow
def test_search_whose_code_refuses_everything_ends_with_an_error(
    create: Callable[..., Experiment],
) -> None:
    script = """
        import paceline as det
        with det.core.init():
            raise det.InvalidHP("never good enough")
    """
    search = {"name": "random", "metric": "loss", "max_trials": 4}
    experiment = create(script, hyperparameters=SPACE, searcher=search)
    data = ended(experiment)
    assert data.state.value == "ERROR"
    assert "100 trials in a row refused their hyperparameters" in data.error


def test_checkpoint_that_a_trial_starts_from_is_not_deleted(
    client: Client, create: Callable[..., Experiment], wait_until: Callable[..., None]
) -> None:
    script = """
        import time
        import paceline as det
        with det.core.init() as context:
            if context.latest_checkpoint:
                time.sleep(60)
            with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
                (path / "x").write_text("x")
    """
    first = create(script)
    ended(first)
    checkpoint = only_trial(first).checkpoints()[0]
    second = only_trial(first).continue_()
    wait_until(lambda: only_trial(second).data.is_running)
    with pytest.raises(ApiError, match="must not be deleted while trial"):
        checkpoint.delete()
    second.kill()
    ended(second)
    checkpoint.delete()
