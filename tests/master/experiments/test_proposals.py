"""Proposals of people and agents for the trials of a search."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline._cluster.master.searches import sampler_answers
from paceline._cluster.master.searches.stored_searches import load_search
from paceline._cluster.master.store import tables
from paceline.config import validate_config
from paceline.search._search import replay
from paceline.search._search_messages import input_from_json, message_to_json

ONE_BY_ONE = {"name": "random", "metric": "loss", "max_trials": 4, "max_concurrent_trials": 1}


def propose(master: Any, *, experiment: int = 1, **fields: Any) -> Any:
    return master.http.post(f"/experiments/{experiment}/proposals", json=fields)


def end_trial(master: Any, attempt_id: int) -> None:
    """Let the trial of an attempt complete, so that the search creates the next."""
    master.schedule()
    master.report(attempt_id, 0, ("validation", 1, {"loss": 1.0}))
    reply = master.attempt(
        attempt_id, "end", reason="exited", code=0, signal=None, time=2.0, detail=None
    )
    assert reply.status_code == 204, reply.text


def trials_of(master: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = master.http.get("/experiments/1/trials").json()["items"]
    return sorted(found, key=lambda trial: trial["id"])


def check_replay(master: Any, *, is_asking: bool) -> None:
    """Check that the stored inputs give the stored operations again."""
    inputs = tables.search_inputs
    with master.core.database.read() as connection:
        row = connection.execute(tables.experiments.select()).one()
        stored = connection.execute(inputs.select().order_by(inputs.c.number)).all()
        again_loaded = load_search(connection, 1).search
    config = validate_config(row.config)
    given = [input_from_json(json.dumps(one.input)) for one in stored]
    again = replay(
        config.search_config(), config.hyperparameters, row.seed, given, is_asking=is_asking
    )
    decided = [[json.loads(message_to_json(one)) for one in group] for group in again]
    assert decided == [one.operations for one in stored]
    assert again_loaded is not None
    assert len(again_loaded.trials()) - len(again_loaded.asks) == len(trials_of(master))


def test_the_next_trials_are_those_that_were_proposed(master: Any) -> None:
    master.create(searcher=ONE_BY_ONE)
    made = propose(master, hparams={"lr": 0.25}, why="it is even", by="ada")
    assert (made.status_code, made.json()["number"], made.json()["trial_id"]) == (201, 1, None)
    assert propose(master, hparams={"lr": 0.75}).json()["by"] == "admin"
    for attempt in (1, 2, 3):
        end_trial(master, attempt)
    values = [trial["hparams"]["lr"] for trial in trials_of(master)]
    assert values[1:3] == [0.25, 0.75]
    assert values[3] not in values[:3]
    told = master.http.get("/trials/2/decisions").json()["proposal"]
    assert told == {"by": "ada", "why": "it is even", "is_fallback": False}
    assert master.http.get("/trials/4/decisions").json()["proposal"] is None
    listed = master.http.get("/experiments/1/proposals").json()
    assert [(one["number"], one["trial_id"]) for one in listed] == [(1, 2), (2, 3)]
    check_replay(master, is_asking=False)


def test_a_search_with_points_takes_these_first(master: Any) -> None:
    points = [{"lr": 0.125}, {"lr": 0.375}]
    master.create(searcher=ONE_BY_ONE | {"points_to_evaluate": points})
    assert propose(master, hparams={"lr": 0.25}).status_code == 201
    for attempt, number in ((1, 2), (2, 3)):
        master.core.sampler_answers.ask(1)
        wait_for_trials(master, number - 1)
        end_trial(master, attempt)
    wait_for_trials(master, 3)
    assert [trial["hparams"]["lr"] for trial in trials_of(master)] == [0.125, 0.375, 0.25]
    check_replay(master, is_asking=True)
    # Its thread would wait for questions.
    master.core.sampler_answers.close()


def wait_for_trials(master: Any, number: int) -> None:
    # The answers come from a thread.
    while len(trials_of(master)) < number:
        time.sleep(0.05)


def test_several_proposers_at_once_have_a_trial_each(master: Any) -> None:
    master.create(searcher=ONE_BY_ONE | {"max_trials": 7})
    values = [round(0.1 * number, 1) for number in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda value: propose(master, hparams={"lr": value}), values))
    taken = [value for value, reply in zip(values, replies, strict=True) if reply.is_success]
    # One trial exists, so that six are still to come.
    assert len(taken) == 6
    refused = [reply.json()["code"] for reply in replies if not reply.is_success]
    assert refused == ["no_trial_left"] * 2
    for attempt in range(1, 7):
        end_trial(master, attempt)
    assert sorted(trial["hparams"]["lr"] for trial in trials_of(master)[1:]) == taken
    assert sorted(one["number"] for one in master.http.get("/experiments/1/proposals").json()) == [
        *range(1, 7)
    ]
    check_replay(master, is_asking=False)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"hparams": {"lr": 2.0}}, 409, "outside_space"),
        ({"hparams": {"lr": "nan"}}, 409, "outside_space"),
        ({"hparams": {"momentum": 0.5}}, 409, "outside_space"),
        ({"hparams": {}}, 422, "invalid_request"),
        ({"hparams": {"lr": 0.5}, "why": "w" * 501}, 422, "invalid_request"),
    ],
)
def test_wrong_proposals_are_refused(
    master: Any, body: dict[str, Any], status: int, code: str
) -> None:
    master.create(searcher=ONE_BY_ONE)
    reply = propose(master, **body)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert master.http.get("/experiments/1/proposals").json() == []


def test_searches_that_take_no_proposal_say_why(master: Any) -> None:
    master.create(searcher=ONE_BY_ONE)
    master.http.post("/experiments/1/kill")
    space = {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0, "count": 3}}
    grid = {"name": "grid", "metric": "loss", "max_concurrent_trials": 1}
    master.create(searcher=grid, hyperparameters=space)
    master.create(searcher={"name": "single", "metric": "loss"})
    codes = [propose(master, experiment=n, hparams={"lr": 0.5}).json()["code"] for n in (1, 2, 3)]
    assert codes == ["search_ended", "nothing_drawn", "no_trial_left"]
    assert propose(master, experiment=9, hparams={"lr": 0.5}).status_code == 404


def test_a_repeated_request_proposes_once(master: Any) -> None:
    master.create(searcher=ONE_BY_ONE)
    body, headers = {"hparams": {"lr": 0.5}}, {"Idempotency-Key": "one"}
    for _ in range(2):
        made = master.http.post("/experiments/1/proposals", json=body, headers=headers)
        assert made.json()["number"] == 1
    assert len(master.http.get("/experiments/1/proposals").json()) == 1


EXTERNAL = ONE_BY_ONE | {"sampler": {"name": "external", "timeout": 600}}


def asks_of(master: Any, **params: Any) -> Any:
    answer = master.http.get("/experiments/1/asks", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def answer_ask(master: Any, ask: str, **fields: Any) -> Any:
    return master.http.post(f"/experiments/1/asks/{ask}", json=fields)


def test_a_program_answers_what_an_external_search_asks(master: Any) -> None:
    """An answer makes the trial, once; it is an input that a replay has, too."""
    master.create(searcher=EXTERNAL)
    found = asks_of(master)
    (ask,) = found["asks"]
    assert [one["name"] for one in found["parameters"]] == ["lr"]
    assert (found["metric"], found["observations"], trials_of(master)) == ("loss", [], [])
    wrong = answer_ask(master, ask["id"], hparams={"lr": 7.0})
    assert (wrong.status_code, wrong.json()["code"]) == (409, "outside_space")
    assert answer_ask(master, "nope", hparams={"lr": 0.5}).json()["code"] == "ask_answered"
    assert answer_ask(master, ask["id"], hparams={"lr": 0.25}, why="even").status_code == 204
    assert [trial["hparams"]["lr"] for trial in trials_of(master)] == [0.25]
    again = answer_ask(master, ask["id"], hparams={"lr": 0.75})
    assert (again.status_code, again.json()["code"]) == (409, "ask_answered")
    decisions = master.http.get("/trials/1/decisions").json()
    assert (decisions["proposal"]["by"], decisions["proposal"]["why"]) == ("admin", "even")
    end_trial(master, 1)
    told = asks_of(master)
    assert [(one["hparams"]["lr"], one["loss"]) for one in told["observations"]] == [(0.25, 1.0)]
    assert propose(master, hparams={"lr": 0.5}).status_code == 201
    assert [trial["hparams"]["lr"] for trial in trials_of(master)] == [0.25, 0.5]
    check_replay(master, is_asking=True)


def test_a_request_waits_for_the_next_ask(master: Any) -> None:
    """A waiting request is answered by the ask that the end of a trial leads to."""
    master.create(searcher=EXTERNAL)
    (ask,) = asks_of(master)["asks"]
    answer_ask(master, ask["id"], hparams={"lr": 0.25})
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(asks_of, master, wait=50)
        time.sleep(0.2)
        assert not waiting.done()
        end_trial(master, 1)
        (after,) = waiting.result()["asks"]
    assert after["id"] != ask["id"]


def test_asks_that_nobody_answers_in_time_are_drawn_at_random_and_counted(master: Any) -> None:
    """Points of the config need no answer; what is late gets its draw, with the reason."""
    searcher = EXTERNAL | {
        "sampler": {"name": "external", "timeout": 0.2},
        "points_to_evaluate": [{"lr": 0.125}],
        "max_concurrent_trials": 2,
    }
    master.create(searcher=searcher)
    # The ask for the point of the config may be open, or the other one already answered.
    late = (asks_of(master)["asks"] or [None])[-1]
    deadline = time.monotonic() + 60
    while len(trials_of(master)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    first, second = trials_of(master)
    assert first["hparams"]["lr"] == 0.125
    assert late is None or second["hparams"] == late["hparams"]
    reason = master.http.get("/trials/2/decisions").json()["proposal"]
    assert "within 0.2 s" in reason["why"], f"the reason must say how long it waited: {reason}"
    sampler = master.http.get("/experiments/1/search").json()["sampler"]
    assert (sampler["num_proposed"], sampler["num_fallbacks"]) == (2, 1)
    check_replay(master, is_asking=True)


def test_many_asks_that_are_late_are_answered_in_small_parts(
    master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job of the writer thread for all of them would let everybody else wait."""
    sizes, given = list[int](), list[int]()
    store = master.core.sampler_answers._store

    def note(transaction: Any, experiment_id: int, answers: Any) -> int:
        given.append(len(answers))
        sizes.append(store(transaction, experiment_id, answers))
        return sizes[-1]

    monkeypatch.setattr(master.core.sampler_answers, "_store", note)
    # No time is left after the first answer of a job.
    monkeypatch.setattr(sampler_answers, "_MOST_STORING_S", -1.0)
    late = {"name": "external", "timeout": 0.2}
    many = {"max_trials": 100, "max_concurrent_trials": 100}
    master.create(searcher=EXTERNAL | many | {"sampler": late})
    deadline = time.monotonic() + 60
    while sum(sizes) < 100 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (sum(sizes), max(sizes), max(given)) == (100, 1, 32), f"{sizes=} {given=}"
    assert len(trials_of(master)) == 100, "no answer is lost between the parts"
    check_replay(master, is_asking=True)


def test_a_pause_of_the_experiment_takes_no_time_of_open_asks(master: Any) -> None:
    """A program answers while the experiment pauses; what is late is late only after the pause."""
    late = {"name": "external", "timeout": 0.3}
    master.create(searcher=EXTERNAL | {"sampler": late, "max_concurrent_trials": 2})
    with ThreadPoolExecutor() as pool:
        assert master.http.post("/experiments/1/pause").status_code == 200
        found = asks_of(master)["asks"]
        time.sleep(1.0)
        assert len(asks_of(master)["asks"]) == len(found) == 2, "nothing is drawn in a pause"
        assert answer_ask(master, found[0]["id"], hparams={"lr": 0.25}).status_code == 204
        waiting = pool.submit(asks_of, master, wait=50)
        assert waiting.result()["asks"] == found[1:]
    assert master.http.post("/experiments/1/activate").status_code == 200
    deadline = time.monotonic() + 60
    while len(trials_of(master)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [one["hparams"] for one in trials_of(master)] == [{"lr": 0.25}, found[1]["hparams"]]
    check_replay(master, is_asking=True)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_request_for_asks_ends_with_its_experiment(master: Any, is_deleted: bool) -> None:
    """Whoever waits is told at once; nothing is answered afterwards, and no thread fails."""
    master.create(searcher=EXTERNAL)
    (ask,) = asks_of(master)["asks"]
    answer_ask(master, ask["id"], hparams={"lr": 0.25})
    master.create(searcher=EXTERNAL)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(asks_of, master, wait=50)
        time.sleep(0.2)
        assert master.http.post("/experiments/1/kill").status_code == 200
        # Long before the time of the request has passed.
        assert waiting.result(timeout=45)["asks"] == []
    if is_deleted:
        assert master.http.delete("/experiments/1").status_code == 200
        assert master.http.get("/experiments/1/asks").status_code == 404
    refused = answer_ask(master, ask["id"], hparams={"lr": 0.5})
    assert refused.status_code == (404 if is_deleted else 409), refused.text
    # Another search of the same master is served as before.
    (other,) = master.http.get("/experiments/2/asks").json()["asks"]
    path = f"/experiments/2/asks/{other['id']}"
    assert master.http.post(path, json={"hparams": {"lr": 0.5}}).status_code == 204


def test_a_full_queue_of_proposals_and_open_asks_lose_nothing(master: Any) -> None:
    """Proposals answer open asks first; as many wait as trials are to come, and no more."""
    master.create(searcher=EXTERNAL)
    codes = [propose(master, hparams={"lr": n / 10}).status_code for n in range(6)]
    assert codes == [201, 201, 201, 201, 409, 409], "four trials take four proposals"
    assert asks_of(master)["asks"] == []
    for number in range(4):
        assert [t["hparams"]["lr"] for t in trials_of(master)] == [
            n / 10 for n in range(number + 1)
        ]
        end_trial(master, number + 1)
    assert master.http.get("/experiments/1").json()["state"] == "COMPLETED"
    check_replay(master, is_asking=True)
