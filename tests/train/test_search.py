"""`train.search`: Paceline's own search methods over a train function, without a master."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import pytest

from paceline import core, train
from paceline._training.masterless_search_trials import checked_search, search_name
from paceline.config import Searcher
from paceline.search import (
    Create,
    ExitReason,
    Operation,
    SearchConfig,
    SearchMethod,
    Space,
    Stop,
    Train,
    TrialMaker,
)

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPACE = {"lr": {"type": "double", "minval": 1.0, "maxval": 2.0}, "epochs": 8}


@pytest.fixture(scope="module")
def trainer() -> Iterator[train.Trainer]:
    """Return a trainer of one worker, which stays from test to test."""
    with train.Trainer(num_workers=1, cluster="local") as trainer:
        yield trainer


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as the worker stays."""


def climb(config: dict[str, Any]) -> str:
    """Add `lr` to a value in each epoch."""
    if config["lr"] > config.get("most", 2.0):
        raise ZeroDivisionError("too steep")
    if config.get("refuses") and config["lr"] < 1.5:
        raise core.InvalidHP("too flat")
    state = train.load_checkpoint() or {"epoch": 0, "value": 0.0}
    value = state["value"]
    for epoch in range(state["epoch"], config["epochs"]):
        value += config["lr"]
        pid = 0 if config.get("hides_pid") else os.getpid()
        train.report(epochs=epoch + 1, loss=-value, pid=pid)
        train.save_checkpoint(epoch=epoch + 1, value=value)
        time.sleep(config.get("pause_s", 0.0))
    return "done"


def asha(**more: Any) -> dict[str, Any]:
    return {
        "name": "adaptive_asha",
        "metric": "loss",
        "max_trials": 6,
        "max_length": {"epochs": 8},
        "max_concurrent_trials": 2,
        **more,
    }


def value_after(lr: float, num_epochs: int) -> float:
    return -sum([lr] * num_epochs)


def told(results: train.SearchResults) -> list[dict[str, Any]]:
    return results.rows()


def test_asha_stops_trials_on_warm_workers(trainer: train.Trainer, tmp_path: Path) -> None:
    pids = trainer.execute(os.getpid)
    results = train.search(
        climb,
        SPACE,
        asha(),
        trainer=trainer,
        max_concurrent_trials=1,
        directory=tmp_path / "search",
        seed=3,
    )
    assert {trial.state for trial in results} == {"completed", "stopped"}
    reports = [trial.num_reports for trial in results]
    assert len(results) == 6
    # A stopped trial trains no further than to the report that was judged.
    assert set(reports) == {2, 8}
    best = results.best_trial
    assert best is not None
    assert best.value == results.ranked()[0].value == value_after(best.config["lr"], 8)
    assert best.config == {**best.config, "epochs": 8}
    # The last state was saved after the last report, at which the search had ended the trial.
    assert results.best_checkpoint is not None
    assert results.best_checkpoint.load()["epoch"] == 7
    assert {trial.metrics["pid"] for trial in results} == set(pids)
    assert trainer.execute(os.getpid) == pids
    text = str(results)
    assert text.splitlines()[0] == repr(results)
    assert "6 trial(s), best loss" in text
    assert "epochs" not in text.splitlines()[1]
    assert results._repr_html_().count("<tr>") == 7

    # An ended search is shown again, and nothing is run.
    again = train.search(
        climb, SPACE, asha(), trainer=trainer, max_concurrent_trials=1, directory=results.directory
    )
    assert told(again) == told(results)
    with pytest.raises(ValueError, match="same `space`"):
        train.search(climb, {**SPACE, "epochs": 9}, asha(), directory=results.directory)


PLAIN = """
import sys
from paceline import train

def climb(config):
    train.report(epochs=1, loss=config["lr"])

if __name__ == "__main__":
    space = {"lr": {"type": "double", "minval": 1.0, "maxval": 2.0}}
    searcher = {"name": "random", "metric": "loss", "max_trials": 2, "max_length": {"epochs": 1}}
    if sys.argv[1:] == ["plain"]:
        train.Trainer(num_workers=0, run_dir="plain").run(climb, {"lr": 1.0})
    for _ in range(0 if sys.argv[1:] else 2):
        results = train.search(climb, space, searcher, max_concurrent_trials=1)
        print(results.directory, *(trial.run_dir.parent for trial in results))
"""


@pytest.mark.long
def test_the_variable_that_names_a_run_resumes_the_first_search_and_leads_no_trial_there(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    run_python(PLAIN, "plain")
    before = sorted(path.name for path in (tmp_path / "plain").rglob("*"))
    done = run_python(PLAIN, PACELINE_RESUME="plain")
    first, second = (line.split() for line in done.stdout.splitlines())
    for directory, *trials in (first, second):
        assert trials == [f"{directory}/trials"] * 2, done.stderr
    assert sorted(path.name for path in (tmp_path / "plain").rglob("*")) == before
    again = run_python(PLAIN, PACELINE_RESUME=first[0])
    resumed, other = (line.split()[0] for line in again.stdout.splitlines())
    assert resumed == first[0]
    # A later search of the script may be of another function.
    assert other not in (first[0], second[0])


@pytest.mark.long
def test_trials_that_fail_or_refuse_their_hyperparameters_are_told(
    trainer: train.Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    random = {"name": "random", "metric": "loss", "max_trials": 6}
    results = train.search(
        climb,
        {**SPACE, "epochs": 1},
        random,
        trainer=trainer,
        max_concurrent_trials=1,
        config={"refuses": True, "most": 1.9},
        seed=1,
    )
    states = [(trial.config["lr"], trial.state) for trial in results]
    assert [state for _, state in states] == [
        "failed" if lr > 1.9 else "invalid" if lr < 1.5 else "completed" for lr, _ in states
    ]
    assert {state for _, state in states} == {"failed", "invalid", "completed"}
    # Trials with invalid hyperparameters are replaced.
    assert sum(state != "invalid" for _, state in states) == 6
    assert "ZeroDivisionError: too steep" in caplog.text
    with pytest.raises(ZeroDivisionError, match="too steep"):
        train.search(climb, SPACE, random, trainer=trainer, config={"most": 0.0})


def explode(config: dict[str, Any]) -> None:
    train.report(epochs=1, loss=config["lr"])
    if config["lr"] > 1.5:
        raise core.NonFiniteError("The loss is NaN.")


def test_trials_whose_loss_is_not_finite_have_diverged(trainer: train.Trainer) -> None:
    random = {"name": "random", "metric": "loss", "max_trials": 4}
    results = train.search(explode, {**SPACE, "epochs": 1}, random, trainer=trainer, seed=1)
    expected = ["diverged" if trial.config["lr"] > 1.5 else "completed" for trial in results]
    assert [trial.state for trial in results] == expected
    assert len(set(expected)) == 2
    assert isinstance(results[expected.index("diverged")].error, core.NonFiniteError)


@pytest.mark.parametrize("searcher", [asha(max_trials=2), {"name": "random", "max_trials": 2}])
def test_a_metric_that_no_report_has_is_an_error(
    trainer: train.Trainer, searcher: dict[str, Any]
) -> None:
    with pytest.raises(
        ValueError, match=r"needs `los` .* no report of trial 1 .*epochs, loss, pid"
    ):
        train.search(
            climb,
            {**SPACE, "epochs": 1},
            {**searcher, "metric": "los"},
            trainer=trainer,
            max_concurrent_trials=1,
        )


def diverge(config: dict[str, Any]) -> None:
    """Report a value that is not finite with every second `lr`."""
    for epoch in range(1, 9):
        train.report(epochs=epoch, loss=float(config["bad"]) if config["lr"] < 1.5 else 1.0)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_what_is_not_finite_trains_no_further_and_is_not_the_best(
    trainer: train.Trainer, bad: str, smaller_is_better: bool
) -> None:
    results = train.search(
        diverge,
        {**SPACE, "bad": bad},
        asha(smaller_is_better=smaller_is_better, mode="aggressive"),
        trainer=trainer,
        max_concurrent_trials=1,
        seed=2,
    )
    diverged = [trial for trial in results if trial.config["lr"] < 1.5]
    assert 0 < len(diverged) < 6
    assert {trial.num_reports for trial in diverged} <= {2}
    assert {trial.state for trial in diverged} == {"stopped"}
    assert results.best_trial is not None
    assert results.best_trial.value == 1.0
    assert results.ranked()[-1] in diverged

    none = train.search(
        diverge,
        {"lr": 1.0, "bad": bad},
        asha(smaller_is_better=smaller_is_better, max_trials=1),
        trainer=trainer,
        max_concurrent_trials=1,
    )
    assert none.best_trial is None
    assert "no value yet" in repr(none)


def test_a_value_that_is_not_finite_does_not_replace_a_trials_best(trainer: train.Trainer) -> None:
    results = train.search(
        late_divergence,
        {"lr": {"type": "double", "minval": 1.0, "maxval": 2.0}},
        {"name": "random", "metric": "loss", "max_trials": 1},
        trainer=trainer,
        max_concurrent_trials=1,
    )
    assert results.best_trial is not None
    assert results.best_trial.value == 2.0


def late_divergence(config: dict[str, Any]) -> None:
    for loss in ("nan", "3.0", "-inf", "2.0", "-inf", "nan"):
        train.report(loss=float(loss))


def refuse(config: dict[str, Any]) -> None:
    (Path(config["notes"]) / f"{config['lr']}").touch()
    raise core.InvalidHP("none will do")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("searcher", [asha(max_trials=2), {"name": "random", "max_trials": 2}])
def test_a_search_ends_once_100_trials_in_a_row_refuse_their_hyperparameters(
    trainer: train.Trainer, tmp_path: Path, searcher: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"100 trials in a row refused .*Hint: narrow") as raised:
        train.search(
            refuse,
            {**SPACE, "notes": str(tmp_path)},
            {"metric": "loss", **searcher},
            trainer=trainer,
            max_concurrent_trials=1,
        )
    assert "none will do" in str(raised.value.__cause__)
    assert len(list(tmp_path.glob("1.*"))) == 100


def meet(config: dict[str, Any]) -> None:
    """Count the trials that run at the same time."""
    own = Path(config["notes"], f"running-{os.getpid()}")
    own.touch()
    for epoch in range(1, 4):
        time.sleep(0.1)
        number = len(list(own.parent.glob("running-*")))
        train.report(epochs=epoch, loss=config["lr"], together=number)
    own.unlink()


def test_no_more_trials_run_at_once_than_the_searcher_says(tmp_path: Path) -> None:
    """The search has two brackets, and there is room for two trials."""
    results = train.search(
        meet,
        {**SPACE, "notes": str(tmp_path)},
        {**asha(max_concurrent_trials=1, max_trials=4), "max_length": {"epochs": 4}},
        max_concurrent_trials=2,
    )
    assert [trial.metrics["together"] for trial in results] == [1] * 4


def say(config: dict[str, Any]) -> None:
    """Report a string with every second `lr`, or nothing of what is searched for."""
    is_bad = config["lr"] < 1.5
    Path(config["notes"], f"{config['lr']}").touch()
    if config["lacks"] and is_bad:
        train.report(accuracy=1.0)
    else:
        train.report(loss="low" if is_bad else 1.0)


@pytest.mark.parametrize("lacks", [False, True])
def test_a_trial_without_a_number_fails_alone_once_another_has_reported_one(
    trainer: train.Trainer, tmp_path: Path, lacks: bool
) -> None:
    results = train.search(
        say,
        {**SPACE, "notes": str(tmp_path), "lacks": lacks},
        {"name": "random", "metric": "loss", "max_trials": 6},
        trainer=trainer,
        max_concurrent_trials=1,
        # The first one reports a number.
        seed=4,
    )
    states = [(trial.config["lr"] < 1.5, trial.state) for trial in results]
    assert states[0] == (False, "completed")
    assert set(states) == {(False, "completed"), (True, "failed")}
    told = "needs `loss` as a number" if lacks else "'loss' must be a number"
    assert all(told in str(trial.error) for trial in results if trial.error)


def test_a_search_ends_at_the_first_trial_without_the_metric_if_none_has_reported_it(
    trainer: train.Trainer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no report of trial 1 had it .*accuracy"):
        train.search(
            say,
            {"lr": 1.0, "notes": str(tmp_path), "lacks": True},
            {"name": "random", "metric": "loss", "max_trials": 6},
            trainer=trainer,
            max_concurrent_trials=1,
        )
    assert len(list(tmp_path.glob("1.0"))) == 1


def report_for_long(config: dict[str, Any]) -> None:
    for _ in range(1000):
        train.report(accuracy=1.0)
    Path(config["notes"], "ended").touch()


def test_a_search_ends_at_the_third_report_without_the_metric_if_none_has_reported_it(
    trainer: train.Trainer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no report of trial 1 had it .*accuracy"):
        train.search(
            report_for_long,
            {"lr": 1.0, "notes": str(tmp_path)},
            asha(max_trials=2),
            trainer=trainer,
            max_concurrent_trials=1,
        )
    assert list(tmp_path.glob("ended")) == []


def evaluate_apart(config: dict[str, Any]) -> None:
    """Report as a library does that has one name for the metric of training and of validation."""
    from paceline.integrations._library_reports import library_report

    for epoch in range(1, 9):
        library_report({"loss": -config["lr"], "epochs": epoch}, {}, step=epoch, evaluates=True)
        evaluated = {"loss": config["lr"], "epochs": epoch}
        library_report({"epochs": epoch}, evaluated, step=epoch, evaluates=True)


def test_what_a_library_evaluates_is_judged_alone(trainer: train.Trainer) -> None:
    results = train.search(
        evaluate_apart,
        {"lr": {"type": "double", "minval": 1.0, "maxval": 2.0}},
        asha(mode="aggressive"),
        trainer=trainer,
        max_concurrent_trials=1,
    )
    assert all(trial.value == trial.config["lr"] for trial in results)
    assert results.best_config == min((trial.config for trial in results), key=lambda c: c["lr"])


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(ValueError, match="max_trials"):
        train.search(climb, SPACE, {"name": "random", "metric": "loss"})
    with pytest.raises(ValueError, match=r"^`space\.lr\.maxval` must be given") as raised:
        train.search(climb, {"lr": {"type": "double", "minval": 1.0}}, asha())
    # Pydantic's own error would be printed first.
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None or raised.value.__suppress_context__
    with pytest.raises(ValueError, match="max_concurrent_trials"):
        train.search(climb, SPACE, asha(), max_concurrent_trials=0)
    with pytest.raises(ValueError, match=r"wait at its reports.*Hint: Trainer\(num_workers=1\)"):
        train.search(climb, SPACE, asha(), trainer=train.Trainer(num_workers=0))


def test_a_list_in_a_space_in_which_nothing_varies_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checked_search({"lr": [0.1, 0.2], "rate": {"type": "const", "val": 1}}, asha())
    assert not caplog.text
    checked_search({"lr": [0.1, 0.2]}, {"name": "grid", "metric": "loss"})
    assert "such as that of 'lr', is one value that each trial gets" in caplog.text


def shared(config: dict[str, Any]) -> None:
    """Report what both workers of a trial have seen."""
    import torch.distributed as dist

    for epoch in range(1, 3):
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, train.world_rank())
        train.report(loss=config["lr"], ranks=ranks, epochs=epoch)


@pytest.mark.slow
def test_trials_have_several_workers(tmp_path: Path) -> None:
    random = {"name": "random", "metric": "loss", "max_trials": 2, "max_length": {"epochs": 2}}
    with train.Trainer(num_workers=2, cpus_per_worker=1) as trainer:
        results = train.search(shared, SPACE, random, trainer=trainer, directory=tmp_path / "s")
    assert [trial.state for trial in results] == ["completed"] * 2
    assert all(trial.metrics["ranks"] == [0, 1] for trial in results)


class Halving(SearchMethod):
    """Have all trials wait at a rung; the better half goes on from there."""

    def __init__(self, maker: TrialMaker) -> None:
        self.maker = maker
        self.rung = 2
        self.open: list[str] = []
        self.told: dict[str, float] = {}

    def start(self) -> list[Operation]:
        creates: list[Create] = [self.maker.sampled() for _ in range(4)]
        self.open = [create.request_id for create in creates]
        return [*creates, *(Train(request_id=one, length=self.rung) for one in self.open)]

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        if time < self.rung:
            return []
        self.told[request_id] = metric
        if len(self.told) < len(self.open):
            return []
        ranked = sorted(self.told, key=self.told.__getitem__)
        half = len(ranked) // 2
        kept, dropped = ranked[:half], ranked[half:]
        self.rung, self.open, self.told = 2 * self.rung, kept, {}
        stops: list[Operation] = [Stop(request_id=one) for one in dropped]
        return [*stops, *(Train(request_id=one, length=self.rung) for one in kept)]

    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        return []

    def num_trials(self, num_invalid: int) -> int:
        return 4

    def snapshot(self) -> dict[str, Any]:
        return {}

    def load(self, snapshot: dict[str, Any]) -> None: ...


class HalvingConfig(SearchConfig):
    kind = "waiting_halving"

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        return Halving(maker)

    def num_planned(self, space: Space) -> int:
        return 4


class HalvingSearcher(Searcher):
    wants_reports = True
    name: Literal["waiting_halving"] = "waiting_halving"
    time_metric: str = "epochs"

    @property
    def length(self) -> int:
        return 8

    def search_config(self) -> SearchConfig:
        return HalvingConfig(metric=self.metric)


@pytest.mark.parametrize("num_concurrent", [1, 2])
def test_trials_wait_for_each_other_and_go_on_from_their_checkpoints(
    trainer: train.Trainer, num_concurrent: int
) -> None:
    results = train.search(
        # A report of other workers that repeats one from before a restart counts once if it is
        # the same; with the id of a process it would not be.
        climb,
        {**SPACE, "hides_pid": True},
        HalvingSearcher(metric="loss"),
        trainer=trainer,
        max_concurrent_trials=num_concurrent,
        seed=4,
    )
    ranked = results.ranked()
    assert [trial.num_reports for trial in ranked] == [8, 4, 2, 2]
    assert [trial.state for trial in ranked] == ["completed", "stopped", "stopped", "stopped"]
    # Whether it went on at once or left its workers meanwhile, each epoch has counted once.
    for trial in ranked:
        assert trial.value == value_after(trial.config["lr"], trial.num_reports)
    assert sorted(trial.config["lr"] for trial in ranked)[::-1] == [
        trial.config["lr"] for trial in ranked
    ]


SEARCH = """
import sys
from paceline import train

def climb(config):
    state = train.load_checkpoint() or {"epoch": 0, "value": 0.0}
    value = state["value"]
    for epoch in range(state["epoch"], 8):
        value += config["lr"]
        train.report(epochs=epoch + 1, loss=-value)
        train.save_checkpoint(epoch=epoch + 1, value=value)

if __name__ == "__main__":
    results = train.search(
        climb,
        {"lr": {"type": "double", "minval": 1.0, "maxval": 2.0}},
        {"name": "adaptive_asha", "metric": "loss", "max_trials": 8, "max_length": {"epochs": 8},
         "max_concurrent_trials": 2},
        max_concurrent_trials=1,
        directory=sys.argv[1],
        seed=5,
    )
    for row in results.rows():
        print("row:", row["trial"], row["state"], row["reports"], row["loss"].hex())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [3, 9, 20])
def test_a_search_goes_on_after_its_driver_was_killed(
    run_python: Callable[..., Any], tmp_path: Path, number: int
) -> None:
    straight = run_python(SEARCH, str(tmp_path / "straight"), name="search.py")
    assert straight.returncode == 0, straight.stderr
    fault = f"train.search.input:{number}"
    killed = run_python(SEARCH, str(tmp_path / "killed"), name="search.py", PACELINE_FAULT=fault)
    assert killed.returncode == -signal.SIGKILL
    resumed = run_python(SEARCH, str(tmp_path / "killed"), name="search.py")
    assert resumed.returncode == 0, resumed.stderr
    rows = [line for line in straight.stdout.splitlines() if line.startswith("row:")]
    assert len(rows) == 8
    assert [line for line in resumed.stdout.splitlines() if line.startswith("row:")] == rows


@pytest.mark.parametrize(
    ("script", "name"), [("fit.py", "fit-search"), ("hp-search.py", "hp-search-trials")]
)
def test_a_search_has_the_name_of_its_script(
    monkeypatch: pytest.MonkeyPatch, script: str, name: str
) -> None:
    monkeypatch.setattr("sys.argv", [script])
    assert search_name() == name


INTERRUPTED = """
import os, sys, time
from pathlib import Path
from paceline import train

def climb(config):
    state = train.load_checkpoint() or {"epoch": 0}
    for epoch in range(state["epoch"], 2):
        if epoch == 1 and not (Path(sys.argv[1]) / "go").exists():
            Path(sys.argv[1], f"{os.getpid()}.waits").touch()
            time.sleep(300)
        train.save_checkpoint(epoch=epoch + 1)
        train.report(epochs=epoch + 1, loss=-config["lr"])

if __name__ == "__main__":
    results = train.search(
        climb,
        {"lr": {"type": "double", "minval": 1.0, "maxval": 2.0}},
        {"name": "random", "metric": "loss", "max_trials": 2, "max_length": {"epochs": 2}},
        max_concurrent_trials=2,
        directory=Path(sys.argv[1]) / "search",
    )
    print([(trial.state, trial.num_reports) for trial in results])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_search_goes_on_after_a_second_ctrl_c(
    run_python: Callable[..., Any], tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env=clean_environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        while len(list(tmp_path.glob("*.waits"))) < 2:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        # The functions are far from their next report, so it must say what it waits for.
        told = next(line for line in process.stderr if "Ctrl-C again" in line)
        assert str(tmp_path / "search") in told
        os.killpg(process.pid, signal.SIGINT)
        told = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "has failed" not in told
    states = {run.name: run.state for run in _runs_of_search(tmp_path / "search")}
    assert set(states.values()) == {core.RunState.PREEMPTED}, states
    (tmp_path / "go").touch()
    resumed = run_python(INTERRUPTED, str(tmp_path))
    assert resumed.stdout == "[('completed', 2), ('completed', 2)]\n", resumed.stderr


def _runs_of_search(directory: Path) -> list[core.RunSummary]:
    return [*core.list_runs(directory.parent), *core.list_runs(directory / "trials")]


def of_two(config: dict[str, Any]) -> None:
    """Report a loss that falls with `lr`, and a cost that rises."""
    for epoch in range(1, 9):
        nan = float("nan")
        train.report(
            epochs=epoch,
            loss=-config["lr"] * epoch,
            cost=nan if config["lr"] > 1.9 else config["lr"],
        )


def test_a_search_of_two_objectives_has_a_front_also_when_it_is_read_again(
    trainer: train.Trainer, tmp_path: Path
) -> None:
    """Whoever is best in one objective is never stopped by the other; all is told again."""
    searcher = asha(objectives=[{"metric": "loss"}, {"metric": "cost"}])
    del searcher["metric"]
    options: dict[str, Any] = {"trainer": trainer, "directory": tmp_path / "s", "seed": 3}
    results = train.search(of_two, SPACE, searcher, **options)
    finite = [trial for trial in results if trial.config["lr"] <= 1.9]
    for trial in finite:
        length = trial.num_reports
        assert trial.values == (-trial.config["lr"] * length, trial.config["lr"]), f"{trial}"
    front = results.best_trials
    assert front, "there is a front"
    assert all(trial in finite for trial in front)
    for trial in finite:
        is_behind = any(
            a <= b and c <= d and (a, c) != (b, d)
            for (a, c), (b, d) in ((other.values, trial.values) for other in finite)
        )
        assert (trial in front) is not is_behind, f"{trial.values}"
    with pytest.raises(RuntimeError, match="`best_trials` is its Pareto front"):
        _ = results.best_trial
    assert "Pareto front of loss, cost" in str(results)
    assert {"loss", "cost"} <= results.rows()[0].keys()
    again = train.search(of_two, SPACE, searcher, **options)
    assert again.rows() == results.rows()
    assert [t.number for t in again.best_trials] == [t.number for t in front]
