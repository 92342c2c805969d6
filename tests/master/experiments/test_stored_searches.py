import json
import random
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from paceline._cluster.master.searches.stored_searches import Searches, load_search
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline.search import Exited, ExitReason, Input, Reported

ALL = ["single", "random", "grid", "halving", "adaptive"]


def running(bench: Any, experiment_id: int) -> list[str]:
    """Return the request ids of the trials that the search waits for."""
    with bench.database.read() as connection:
        search = load_search(connection, experiment_id).search
    assert search is not None
    return [t.request_id for t in search.trials() if t.exit_reason is None]


def apply(bench: Any, searches: Searches, experiment_id: int, given: Input) -> list[Any]:
    found: list[Any] = bench.write(lambda t: searches.apply(t, experiment_id, given))
    return found


def snapshot_of(bench: Any, searches: Searches, experiment_id: int) -> dict[str, Any]:
    """Return a search's state as JSON gives it back."""
    found = bench.write(lambda t: searches.peek(t, experiment_id).snapshot())
    decoded: dict[str, Any] = json.loads(json.dumps(found))
    return decoded


def some_input(bench: Any, experiment_id: int, dice: random.Random, step: int) -> Input | None:
    """Return something that may happen next, None when all trials have ended."""
    ids = running(bench, experiment_id)
    if not ids:
        return None
    request_id = dice.choice(ids)
    if dice.random() < 0.3:
        return Exited(request_id=request_id, reason=dice.choice(list(ExitReason)))
    metric = dice.choice([dice.random(), float("nan"), float("inf"), 0.5])
    time = dice.choice([1.0, 2.0, 4.0, 8.0, float(step)])
    return Reported(request_id=request_id, time=time, metric=metric)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_a_search_read_from_the_database_equals_the_live_one_at_every_point(
    bench: Any, kind: str, seed: int
) -> None:
    experiment_id = bench.create(kind)
    dice = random.Random(seed)
    for step in range(60):
        given = some_input(bench, experiment_id, dice, step)
        if given is None:
            break
        apply(bench, bench.searches, experiment_id, given)
        live = snapshot_of(bench, bench.searches, experiment_id)
        assert snapshot_of(bench, Searches(), experiment_id) == live
    bench.check_replay(experiment_id)


@pytest.mark.long
def test_long_searches_are_restored_from_a_snapshot_and_the_inputs_after_it(bench: Any) -> None:
    """Each trial is created by the exit of the one before it."""
    experiment_id = bench.create("random", searcher={"max_trials": 400, "max_concurrent_trials": 1})
    in_snapshot = []
    for _ in range(330):
        [request_id] = running(bench, experiment_id)[-1:]
        apply(
            bench, bench.searches, experiment_id,
            Exited(request_id=request_id, reason=ExitReason.COMPLETED),
        )  # fmt: skip
        stored = bench.rows(tables.search_snapshots)
        in_snapshot.append(stored[0].num_inputs if stored else 0)
    assert len(bench.rows(tables.search_snapshots)) == 1
    assert sorted(set(in_snapshot)) == [0, 100, 200, 300]
    with bench.database.read() as connection:
        loaded = load_search(connection, experiment_id)
    assert (loaded.num_inputs, loaded.num_in_snapshot) == (331, 300)
    assert loaded.search is not None
    assert len(loaded.search.trials()) == 331
    assert snapshot_of(bench, Searches(), experiment_id) == snapshot_of(
        bench, bench.searches, experiment_id
    )
    bench.check_replay(experiment_id)


@pytest.mark.parametrize("kind", ["random", "adaptive"])
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_job_that_fails_after_an_input_leaves_neither_input_nor_state(
    bench: Any, kind: str, is_cached: bool
) -> None:
    experiment_id = bench.create(kind)
    searches = bench.searches if is_cached else Searches()
    before = snapshot_of(bench, Searches(), experiment_id)
    request_id = running(bench, experiment_id)[0]

    def job(transaction: Transaction) -> None:
        searches.apply(
            transaction, experiment_id, Exited(request_id=request_id, reason=ExitReason.ERROR)
        )
        raise RuntimeError("after the input")

    with pytest.raises(RuntimeError, match="after the input"):
        bench.write(job)
    assert len(bench.inputs(experiment_id)) == 1
    assert snapshot_of(bench, searches, experiment_id) == before
    again = Exited(request_id=request_id, reason=ExitReason.COMPLETED)
    apply(bench, searches, experiment_id, again)
    assert snapshot_of(bench, Searches(), experiment_id) == snapshot_of(
        bench, searches, experiment_id
    )
    bench.check_replay(experiment_id)


def test_a_failed_job_between_two_good_ones_of_a_commit_takes_only_its_own_input_back(
    bench: Any,
) -> None:
    experiment_id = bench.create("random", searcher={"max_trials": 9, "max_concurrent_trials": 3})
    first, second, third = running(bench, experiment_id)

    def job(request_id: str, fails: bool) -> Any:
        def run(transaction: Transaction) -> None:
            given = Exited(request_id=request_id, reason=ExitReason.COMPLETED)
            bench.searches.apply(transaction, experiment_id, given)
            if fails:
                # A unique key, used again.
                transaction.connection.execute(
                    insert(tables.meta).values(key="schema_version", value="")
                )

        return run

    futures = [
        bench.database.write(job(request_id, request_id == second))
        for request_id in (first, second, third)
    ]
    futures[0].result()
    with pytest.raises(Exception, match="UNIQUE"):
        futures[1].result()
    futures[2].result()
    ended = [given["request_id"] for given in bench.inputs(experiment_id)[1:]]
    assert ended == [first, third]
    assert second in running(bench, experiment_id)
    assert snapshot_of(bench, bench.searches, experiment_id) == snapshot_of(
        bench, Searches(), experiment_id
    )
    bench.check_replay(experiment_id)


def test_a_failed_creation_leaves_nothing(bench: Any) -> None:
    def job(transaction: Transaction) -> None:
        from paceline.config import validate_config

        config = validate_config(
            {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}
        )
        bench.commands.create(
            transaction, config, submitted_config=None, context_digest=None, activate=True
        )
        raise RuntimeError("too late")

    with pytest.raises(RuntimeError, match="too late"):
        bench.write(job)
    assert bench.rows(tables.experiments) == []
    assert bench.rows(tables.trials) == []
    # SQLite uses the id again: the new experiment must not meet the old one's search.
    experiment_id = bench.create("grid")
    assert len(bench.trials(experiment_id)) == 2
    bench.check_replay(experiment_id)


def test_an_ended_search_is_forgotten_and_can_still_be_read(bench: Any) -> None:
    experiment_id = bench.create("single")
    attempt_id = bench.start(1)
    bench.end(attempt_id)
    assert bench.state(experiment_id) == "COMPLETED"
    assert bench.searches._loaded == {}
    with bench.database.read() as connection:
        loaded = load_search(connection, experiment_id)
        count = connection.execute(select(func.count()).select_from(tables.search_inputs)).scalar()
    assert loaded.search is not None
    assert loaded.search.is_over
    assert loaded.num_inputs == count == 2
