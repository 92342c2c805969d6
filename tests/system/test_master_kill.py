"""kill -9 of the master in the middle of a search: nothing is lost, doubled or decided anew.

The script notes each of its reports in a file of its own before it reports it, so the test knows
what was reported whatever happened to the master.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import create_engine, text

from paceline import faults
from paceline.client import Client, MasterUnreachableError
from paceline.config import validate_config
from paceline.search._search import replay
from paceline.search._search_messages import input_from_json, message_to_json

SCRIPT = """
import json, os, time
import paceline as det

info = det.get_cluster_info()
lr = info.trial.hparams["lr"]
with det.core.init() as context:
    start = 0
    if info.latest_checkpoint:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            start = int((path / "epoch").read_text())
    for epoch in range(start + 1, 10):
        time.sleep(0.02)
        loss = abs(lr - 0.3) + 1.0 / epoch
        with open(os.environ["NOTES"], "a") as notes:
            notes.write(json.dumps([info.trial.trial_id, epoch, loss]) + "\\n")
        context.train.report_training_metrics(epoch, {"lr": lr})
        context.train.report_validation_metrics(epoch, {"loss": loss, "epochs": epoch})
        if epoch % 3 == 0:
            with context.checkpoint.store_path({"steps_completed": epoch}) as (path, _):
                (path / "epoch").write_text(str(epoch))
        if context.preempt.should_preempt():
            break
"""

FULL = "PACELINE_TEST_FULL" in os.environ
RANDOM_ROUNDS = 30 if FULL else 1
# Each point is hit in the middle of the search, not at its first trial.
POINTS = [
    "master.records.stored:9",
    "master.attempt.spawned:3",
    "master.attempt.ended:2",
    "master.search.applied:7",
    "master.trial.created:7",
    "master.trial.ended:2",
    "master.attempt.created:3",
    "master.retention.deleted:1",
]


def config(notes: Path) -> dict[str, Any]:
    return {
        "name": "killed",
        "entrypoint": "python3 train.py",
        "hyperparameters": {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}},
        "searcher": {
            "name": "adaptive_asha",
            "metric": "loss",
            "time_metric": "epochs",
            "max_time": 9,
            "max_trials": 8,
            "max_concurrent_trials": 4,
            "divisor": 3,
        },
        "reproducibility": {"experiment_seed": 11},
        "environment": {"variables": {"NOTES": str(notes)}},
        "checkpoint_storage": {"save_trial_latest": 1, "save_trial_best": 0},
    }


def read_search(home: Path) -> tuple[list[Any], list[Any]]:
    """Return the stored inputs and the stored operations of the first experiment."""
    engine = create_engine(f"sqlite:///{home / 'master.sqlite'}")
    with engine.connect() as connection:
        rows = connection.execute(
            text("select input, operations from search_inputs order by number")
        ).all()
    engine.dispose()
    return [json.loads(row[0]) for row in rows], [json.loads(row[1]) for row in rows]


def outcome(client: Client, home: Path) -> list[Any]:
    """Return what must not depend on when the master died, with one slot."""
    trials = sorted(client.get_experiment(1).trials(), key=lambda trial: trial.id)
    seen = [(t.id, t.hparams, t.state.value, t.data.seed) for t in trials]
    inputs, operations = read_search(home)
    return [seen, inputs, operations]


def check_search_log(home: Path, stored_config: dict[str, Any]) -> None:
    """Replaying the stored inputs gives exactly the stored decisions."""
    inputs, operations = read_search(home)
    checked = validate_config(stored_config)
    again = replay(
        checked.search_config(),
        checked.hyperparameters,
        11,
        [input_from_json(json.dumps(given)) for given in inputs],
        is_asking=checked.searcher.is_asking,
    )
    assert [[json.loads(message_to_json(o)) for o in decided] for decided in again] == operations


def check_metrics(client: Client, notes: Path) -> None:
    """Every report is stored once, under its trial and step, and nothing else is."""
    reported: dict[int, dict[int, float]] = {}
    for line in notes.read_text().splitlines():
        trial_id, epoch, loss = json.loads(line)
        reported.setdefault(trial_id, {})[epoch] = loss
    for trial in client.get_experiment(1).trials():
        rows = list(trial.iter_metrics("validation"))
        stored = {row.steps_completed: row.metrics["loss"] for row in rows}
        assert len(rows) == len(stored)
        assert stored == reported.get(trial.id, {})
        training = [row.steps_completed for row in trial.iter_metrics("training")]
        assert training == sorted(stored)
        counted = trial.reload().data.summary.get("validation", {}).get("loss")
        assert (counted.count if counted else 0) == len(stored)


def run_search(master: Any, context: Path, notes: Path, disturb: Callable[[Any], None]) -> Client:
    experiment = master.client().create_experiment(config(notes), context)
    disturb(master)
    deadline, left = time.monotonic() + 200, []
    while True:
        if not master.is_alive:
            master.start()
        try:
            client = master.client()
            experiment = client.get_experiment(experiment.id)
            left = master.processes()[1:]
            if experiment.state.is_terminal and not left:
                return client
        except (MasterUnreachableError, FileNotFoundError):
            pass
        assert time.monotonic() < deadline, (experiment.state, left, master.log())
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The outcome of a search that nobody disturbs, filled in by the first test that needs it."""
    return {}


@pytest.fixture
def straight(
    undisturbed: dict[str, Any],
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    tmp_path: Path,
) -> list[Any]:
    """Return the outcome of an undisturbed search with one slot."""
    if "outcome" not in undisturbed:
        master = make_master(1, "straight").start()
        notes = tmp_path / "straight.notes"
        context = write_context(SCRIPT, "straight-context")
        client = run_search(master, context, notes, lambda _: None)
        check_metrics(client, notes)
        undisturbed["outcome"] = outcome(client, master.home)
        master.close()
    result: list[Any] = undisturbed["outcome"]
    return result


def kill_at_random(seed: int) -> Callable[[Any], None]:
    def disturb(master: Any) -> None:
        moments = random.Random(seed)
        for _ in range(2):
            time.sleep(moments.uniform(0.0, 2.5))
            master.kill()
            time.sleep(moments.uniform(0.0, 1.0))
            master.start()

    return disturb


@pytest.mark.long
@pytest.mark.parametrize("seed", range(RANDOM_ROUNDS))
def test_search_with_one_slot_ends_as_undisturbed_after_kills_at_random_moments(
    seed: int,
    straight: list[Any],
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    tmp_path: Path,
) -> None:
    master = make_master(1).start()
    notes = tmp_path / "notes"
    client = run_search(master, write_context(SCRIPT), notes, kill_at_random(seed))
    assert outcome(client, master.home) == straight
    check_metrics(client, notes)
    check_search_log(master.home, client.get_experiment(1).config)


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=[] if i < 1 else pytest.mark.slow) for i, p in enumerate(POINTS)],
)
def test_search_with_one_slot_ends_as_undisturbed_after_a_kill_at_a_fault_point(
    point: str,
    straight: list[Any],
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    tmp_path: Path,
) -> None:
    master = make_master(1).start(fault=point)
    notes = tmp_path / "notes"
    died = []

    def await_death(master: Any) -> None:
        master.wait(200)
        died.append(True)

    client = run_search(master, write_context(SCRIPT), notes, await_death)
    assert died
    assert outcome(client, master.home) == straight
    check_metrics(client, notes)
    check_search_log(master.home, client.get_experiment(1).config)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3 if FULL else 1))
def test_search_with_two_slots_keeps_every_report_and_decision_after_kills(
    seed: int,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    tmp_path: Path,
) -> None:
    master = make_master(2).start()
    notes = tmp_path / "notes"
    client = run_search(master, write_context(SCRIPT), notes, kill_at_random(100 + seed))
    assert len(client.get_experiment(1).trials()) == 8
    check_metrics(client, notes)
    check_search_log(master.home, client.get_experiment(1).config)


FAST = """
import paceline as det

lr = det.get_cluster_info().trial.hparams["lr"]
with det.core.init() as context:
    for epoch in range(1, 10):
        metrics = {"loss": abs(lr - 0.3) + 1.0 / epoch, "score": lr * epoch, "epochs": epoch}
        context.train.report_validation_metrics(epoch, metrics)
        if context.preempt.should_preempt():
            break
"""
NUM_TRIALS, NUM_KILLS = (200, 50) if FULL else (40, 8)


@pytest.mark.slow
@pytest.mark.parametrize("searcher", [
    {"metric": "loss"},
    {"metric": "loss", "promotion": True, "sampler": {"name": "optuna", "of": "tpe"}},
    {"objectives": [{"metric": "loss"}, {"metric": "score", "smaller_is_better": False}]},
], ids=["asha", "promotion-tpe", "two-objectives"])  # fmt: skip
def test_a_large_search_keeps_its_decisions_when_anything_is_killed(
    searcher: dict[str, Any],
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
) -> None:
    """Master, runners and trials end by SIGKILL at random: stored inputs give stored decisions."""
    master = make_master(2).start()
    many = {"max_trials": NUM_TRIALS, "max_concurrent_trials": 8} | searcher
    common = config(Path("unused"))
    common["searcher"] = {k: v for k, v in common["searcher"].items() if k != "metric"} | many
    experiment = master.client().create_experiment(
        {**common, "max_restarts": 100}, write_context(FAST)
    )
    choices, killed = random.Random(len(many)), Counter[str]()
    deadline = time.monotonic() + 30 * NUM_KILLS
    while time.monotonic() < deadline:
        if sum(killed.values()) < NUM_KILLS:
            time.sleep(choices.uniform(0.05, 0.5))
            others = master.processes()[1:] if master.is_alive else []
            if not others or choices.random() < 0.25:
                master.kill()
                killed["master"] += 1
            else:
                # Runners and trials, whichever there are.
                with suppress(psutil.NoSuchProcess):
                    other = choices.choice(others)
                    words = " ".join([other.name(), *other.cmdline()])
                    name = "runner" if "runner" in words else "trial"
                    other.kill()
                    killed[name] += 1
        if not master.is_alive:
            master.start()
        with suppress(MasterUnreachableError, FileNotFoundError):
            experiment = master.client().get_experiment(experiment.id)
            if experiment.state.is_terminal:
                break
            if sum(killed.values()) >= NUM_KILLS:
                time.sleep(0.2)
    assert experiment.state.value == "COMPLETED", f"{experiment.data.error} {killed}"
    trials = experiment.trials()
    assert len(trials) == NUM_TRIALS, f"{len(trials)} trials after {killed}"
    print(f"killed: {dict(killed)}")
    check_search_log(master.home, experiment.config)
    for trial in trials:
        rows = {row.steps_completed: row.metrics for row in trial.iter_metrics("validation")}
        lr = trial.hparams["lr"]
        assert rows == {
            e: {"loss": abs(lr - 0.3) + 1.0 / e, "score": lr * e, "epochs": e} for e in rows
        }, f"trial {trial.id} has its own values"


def test_every_fault_point_of_the_master_is_in_the_campaign() -> None:
    import paceline._cluster.master.server  # noqa: F401  # registers the points

    covered = {point.partition(":")[0] for point in POINTS}
    # Two have tests below, one is in `test_node_checkpoints.py`.
    covered |= {"master.experiment.created", "master.deletion.committed"}
    covered |= {"master.checkpoint.moved_in"}
    assert {p for p in faults.points() if p.startswith("master.")} == covered


def test_experiment_whose_creation_was_cut_short_does_not_exist(
    make_master: Callable[..., Any], write_context: Callable[..., Path], tmp_path: Path
) -> None:
    master = make_master(1).start(fault="master.experiment.created")
    context = write_context(SCRIPT)
    with pytest.raises(MasterUnreachableError):
        master.client().create_experiment(config(tmp_path / "notes"), context)
    master.wait(60)
    master.start()
    assert master.client().list_experiments() == []


@pytest.mark.long
def test_a_bulk_deletion_that_is_cut_leaves_experiments_whole_and_ends_later(
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    """Killed between the rows and the files of the second of three experiments."""
    master = make_master(2).start(fault="master.deletion.committed:2")
    client, context = master.client(), write_context(SCRIPT)
    changes = {"searcher": {"name": "single", "metric": "loss", "max_length": 9}}
    made = [
        client.create_experiment({**config(tmp_path / "notes"), **changes}, context)
        for _ in range(3)
    ]
    for one in made:
        one.wait(0.2, 120)
    uuids = {one.id: [c.uuid for c in one.checkpoints() if c.state.value != "DELETED"]
             for one in made}  # fmt: skip
    assert all(uuids.values()), f"{uuids} have checkpoints"
    found = client.preview_action("delete", "name:killed")
    assert found.experiment_ids == [3, 2, 1]
    with pytest.raises(MasterUnreachableError):
        list(client.act_on("delete", found.experiment_ids))
    master.wait(60)
    master.start()
    client = master.client()
    [left] = client.list_experiments()
    assert (left.id, len(list(left.trials()[0].iter_metrics("validation")))) == (1, 9)
    stored = master.home / "checkpoints"
    wait_until(lambda: not any((stored / uuid).exists() for uuid in uuids[2] + uuids[3]))
    assert all((stored / uuid).exists() for uuid in uuids[1])
    again = client.preview_action("delete", "name:killed").experiment_ids
    assert [one.error for one in client.act_on("delete", again)] == [None]
    assert not any((stored / uuid).exists() for uuid in uuids[1])
