"""From events of a master to requests at real receivers."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

import paceline
from paceline._cluster.messages.runner_messages import PROTOCOL

# As often as they like, so that tests need not wait.
FAST = {"pause": 0.01}
RULE = {"to": ["team"], "events": ["experiment_ended", "experiment_failed", "node_lost"]}


@pytest.fixture
def write_notify(tmp_path: Path, secret: str) -> Callable[..., Path]:
    """Return a function that writes `notify.yaml` with webhooks by name, and returns the home."""

    def write(rules: list[dict[str, Any]] | None = None, **urls: str) -> Path:
        home = tmp_path / "home"
        home.mkdir(mode=0o700, exist_ok=True)
        channels = {name: {"webhook": url, "secret": secret, **FAST} for name, url in urls.items()}
        rules = [RULE] if rules is None else rules
        (home / "notify.yaml").write_text(yaml.safe_dump({"channels": channels, "rules": rules}))
        return home

    return write


@pytest.fixture
def start(write_notify: Callable[..., Path], make_master: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that serves a master that sends."""

    def begin(rules: list[dict[str, Any]] | None = None, **urls: str) -> Any:
        write_notify(rules, **urls)
        master = make_master()
        master.core.notifier.start()
        return master

    return begin


def end_experiment(master: Any, name: str = "served", **changed: Any) -> int:
    """Let an experiment end, without a trial that ran."""
    experiment_id: int = master.create(name=name, **changed)
    assert master.http.post(f"/experiments/{experiment_id}/kill").status_code == 200
    return experiment_id


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ended_experiment_reaches_the_webhook_of_a_rule(
    start: Callable[..., Any], make_receiver: Callable[..., Any]
) -> None:
    receiver = make_receiver()
    master = start(team=receiver.url)
    experiment_id = end_experiment(master)
    body = receiver.next().json()
    assert body["cluster_id"] == master.home.cluster_id
    [group] = body["groups"]
    notice = group["notice"]
    assert notice["title"] == f"Experiment {experiment_id} (served) ended: CANCELED"
    assert notice["experiment_id"] == experiment_id


def test_experiment_chooses_channels_by_name(
    start: Callable[..., Any], make_receiver: Callable[..., Any]
) -> None:
    mine, others = make_receiver(), make_receiver()
    master = start([], mine=mine.url, others=others.url)
    end_experiment(master, "without")
    end_experiment(master, "with", notify={"to": ["mine"]})
    assert mine.next().titles() == ["Experiment 2 (with) ended: CANCELED"]
    assert others.requests.empty()


def test_channel_that_the_master_does_not_have_is_refused(
    start: Callable[..., Any], make_receiver: Callable[..., Any]
) -> None:
    master = start(team=make_receiver().url)
    config = {
        "entrypoint": "true",
        "searcher": {"name": "single", "metric": "loss"},
        "notify": {"to": ["team", "https://stranger.example/hook"]},
    }
    reply = master.http.post("/experiments", json={"config": config})
    assert reply.status_code == 422
    assert "`notify.to` must name channels" in reply.json()["detail"]
    assert "https://stranger.example/hook" in reply.json()["detail"]


def test_rule_with_labels_holds_for_experiments_that_have_all(
    start: Callable[..., Any], make_receiver: Callable[..., Any]
) -> None:
    receiver = make_receiver()
    master = start([{**RULE, "labels": ["nightly", "big"]}], team=receiver.url)
    end_experiment(master, "one", labels=["nightly"])
    end_experiment(master, "both", labels=["big", "x", "nightly"])
    assert receiver.next().titles() == ["Experiment 2 (both) ended: CANCELED"]


def test_alerts_and_thresholds_of_a_trial(
    start: Callable[..., Any], make_receiver: Callable[..., Any]
) -> None:
    receiver = make_receiver()
    master = start([], team=receiver.url)
    limits = [{"metric": "loss", "above": 5}, {"metric": "m900", "below": 0}]
    master.create(notify={"to": ["team"], "alert_level": "warn", "thresholds": limits})
    master.schedule()
    master.report(1, 0, ("training", 1, {"loss": 4.0}))
    # Reports that large are not part of events.
    many = {f"m{number}": float(number) for number in range(900)}
    master.report(1, 1, ("training", 2, {**many, "loss": 6.0, "m900": -1.0}))
    alerts = [
        {"type": "alert", "time": time.time(), "title": title, "description": "", "level": level}
        for title, level in (("quiet", "info"), ("loud", "error"))
    ]
    records = [[number, alert] for number, alert in enumerate(alerts, 2)]
    batch = {"generation": 0, "rank": 0, "records": records}
    assert master.attempt(1, "records", batches=[batch]).status_code == 200
    found: set[str] = set()
    while len(found) < 3:
        for group in receiver.next().json()["groups"]:
            found |= {group["notice"]["title"], *group["more"]}
    assert found == {
        "loss is 6, above 5, in trial 1 of experiment 1 (served)",
        "m900 is -1, below 0, in trial 1 of experiment 1 (served)",
        "loud (trial 1 of experiment 1 (served))",
    }


@pytest.mark.long
def test_silent_trial(start: Callable[..., Any], make_receiver: Callable[..., Any]) -> None:
    receiver = make_receiver()
    master = start([], team=receiver.url)
    master.create(notify={"to": ["team"], "silent_after": 0.5})
    master.schedule()
    master.report(1, 0, ("training", 1, {"loss": 4.0}))
    assert receiver.next().titles() == ["Trial 1 of experiment 1 (served) reports nothing"]


def test_lost_node(start: Callable[..., Any], make_receiver: Callable[..., Any]) -> None:
    receiver = make_receiver()
    master = start(team=receiver.url)
    facts = {
        "name": "box", "key": "key", "version": paceline.__version__, "protocol": PROTOCOL,
        "python": "/opt/python", "python_version": "3.11.7", "devices": ["cpu"],
        "device_kind": "some CPU", "num_cores": 8, "memory_bytes": 2**34, "labels": {},
    }  # fmt: skip
    session = master.http.post("/nodes", json=facts).json()
    poll = {"key": "key", "session": session["session"], "number": 1, "attempts": [], "alive": []}
    path = f"/nodes/{session['node_id']}/poll"
    assert master.http.post(path, json=poll).status_code == 200

    def lose() -> None:
        master.core.nodes.presence.leases.advance(61)
        master.core.lost_nodes._next_look = 0.0
        master.core.database.write(master.core.lost_nodes.look).result()

    lose()
    assert receiver.next().titles() == ["The node box is lost"]
    # A master that starts again looks at it as if for the first time.
    master.core.lost_nodes._stored_seen = {}
    lose()
    end_experiment(master, "later")
    assert receiver.next().titles() == ["Experiment 1 (later) ended: CANCELED"]


def test_hanging_receiver_holds_up_nothing(
    start: Callable[..., Any], make_receiver: Callable[..., Any]
) -> None:
    hanging = make_receiver(lambda handler: hanging.release.wait())
    good = make_receiver()
    rule = {**RULE, "to": ["hanging", "good"]}
    master = start([rule], hanging=hanging.url, good=good.url)
    end_experiment(master, "one")
    hanging.next()
    assert good.next().titles() == ["Experiment 1 (one) ended: CANCELED"]
    end_experiment(master, "two")
    assert good.next().titles() == ["Experiment 2 (two) ended: CANCELED"]
    # It ends while the request hangs, and the next master sends what has no answer.
    master.core.notifier.close()


@pytest.mark.long
def test_failing_receiver_is_tried_again_and_shown(
    start: Callable[..., Any], make_receiver: Callable[..., Any], free_port: int
) -> None:
    master = start(team=f"http://127.0.0.1:{free_port}/TOKEN123")
    end_experiment(master, "one")

    def problems() -> list[str]:
        return [one for one in master.http.get("/status").json()["problems"] if "channel" in one]

    wait_for(problems)
    [text] = problems()
    assert "The channel team cannot be sent to: ConnectError" in text
    assert "TOKEN123" not in text
    [channel] = master.http.get("/notify-channels").json()
    assert (channel["kind"], channel["num_waiting"]) == ("webhook", 1)
    receiver = make_receiver(500, (429, {"Retry-After": "1"}), port=free_port)
    ids = {receiver.next().json()["id"] for _ in range(3)}
    assert len(ids) == 1
    wait_for(lambda: not problems())
    [channel] = master.http.get("/notify-channels").json()
    assert (channel["num_waiting"], channel["failure"]) == (0, None)


@pytest.mark.long
@pytest.mark.parametrize(
    "url",
    [
        "slack://T1JJ3T3L2/A1BRTD4JD/SECRET5kdnlazkcOXrIdev12",
        "discord://4174296324183162/SECRET5kdnlazkcOXrIdev12",
        "workflows://prod-1.westeurope.logic.azure.com:443/643e69f83c8944/SECRET5kdnlazkcOXr",
    ],
    ids=["slack", "discord", "teams"],
)
def test_chat_that_fails_once_gets_the_message_and_nobody_its_address(
    write_notify: Callable[..., Path],
    make_master: Callable[..., Any],
    internet: Any,
    caplog: pytest.LogCaptureFixture,
    url: str,
) -> None:
    pytest.importorskip("apprise")
    caplog.set_level(0)
    channels = {"team": {"url": url, **FAST}}
    path = write_notify() / "notify.yaml"
    path.write_text(yaml.safe_dump({"channels": channels, "rules": [RULE]}))
    master = make_master()
    master.core.notifier.start()
    internet.answers[:] = [500]
    end_experiment(master)

    bodies = [json.loads(internet.next().body) for _ in range(2)]
    first, second = ("served" in json.dumps(body) for body in bodies)
    assert first
    assert second

    def channel() -> dict[str, Any]:
        [found] = master.http.get("/notify-channels").json()
        return dict(found)

    wait_for(lambda: channel()["num_waiting"] == 0)
    assert (channel()["kind"], channel()["failure"]) == (url.partition(":")[0], None)
    internet.answers[:] = [403]
    refused = master.http.post("/notify-channels/team/test").json()
    assert "403" in refused["failure"]
    told = [caplog.text, master.http.get("/status").text, str(refused), str(channel())]
    assert not [text for text in told if "SECRET5" in text or "643e69f83c8944" in text]


def test_runs_that_ended_long_ago_are_no_news(
    start: Callable[..., Any], make_receiver: Callable[..., Any]
) -> None:
    receiver = make_receiver()
    master = start(team=receiver.url)
    now = time.time()
    for name, ended_at in (("old", now - 2 * 86400), ("new", now - 3600)):
        send_run(master, name, ended_at)
    assert receiver.next().titles() == ["Experiment 2 (new) ended: COMPLETED"]


def send_run(master: Any, name: str, ended_at: float, **config: Any) -> None:
    """Send a run without a master, which completed."""
    info = {
        "run_id": name, "name": name, "created": ended_at - 10.0, "checkpoint_storage": "/none",
        "trial": {
            "trial_id": 0, "experiment_id": 0, "trial_seed": 1, "hparams": {}, "config": config,
        },
    }  # fmt: skip
    reply = master.http.put(f"/runs/{name}", json={"info": info, "path": "/p"})
    assert reply.status_code == 200, reply.text
    start = {
        "type": "attempt_started", "time": ended_at - 10.0, "attempt": 1, "generation": 0,
        "rank": 0, "world_size": 1, "host": "far", "pid": 1, "resumed_from": None,
        "steps_completed": 0,
    }  # fmt: skip
    end = {"type": "finished", "time": ended_at, "outcome": "completed", "error": None}
    batch = {"attempt": 1, "generation": 0, "rank": 0, "records": [[0, start], [1, end]]}
    body = {"batches": [batch], "is_alive": False}
    reply = master.http.post(f"/runs/{name}/records", json=body)
    assert reply.status_code == 200, reply.text


def test_config_of_a_run_without_a_master_names_no_channels(
    start: Callable[..., Any], make_receiver: Callable[..., Any]
) -> None:
    mine, team = make_receiver(), make_receiver()
    master = start(mine=mine.url, team=team.url)
    config = {"entrypoint": "true", "notify": {"to": ["mine"]}}
    send_run(master, "run", time.time(), **config)
    assert team.next().titles() == ["Experiment 1 (run) ended: COMPLETED"]
    assert mine.requests.empty()


def test_test_message_says_how_it_went(
    start: Callable[..., Any], make_receiver: Callable[..., Any]
) -> None:
    receiver = make_receiver(200, 403)
    master = start(team=receiver.url)
    test = "/notify-channels/team/test"
    assert master.http.post(test).json() == {"failure": None}
    assert receiver.next().titles() == ["Test message of Paceline"]
    assert "HTTP 403" in master.http.post(test).json()["failure"]
    reply = master.http.post("/notify-channels/nobody/test")
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


def test_events_from_before_the_channels_give_no_messages(
    make_master: Callable[..., Any],
    write_notify: Callable[..., Path],
    make_receiver: Callable[..., Any],
) -> None:
    first = make_master()
    first.core.notifier.start()
    end_experiment(first, "before")
    first.close()
    receiver = make_receiver()
    write_notify(team=receiver.url)
    second = make_master()
    second.core.notifier.start()
    end_experiment(second, "after")
    assert receiver.next().titles() == ["Experiment 2 (after) ended: CANCELED"]


def test_master_killed_between_event_and_sending_sends_after_its_restart(
    write_notify: Callable[..., Path],
    make_receiver: Callable[..., Any],
    master_server: Any,
) -> None:
    receiver = make_receiver(500, *9 * [503])
    home = write_notify(team=receiver.url)
    process = master_server.start_master(home, "--port", 0, "--slots", 1)
    address = json.loads((home / "master.json").read_text())
    headers = {"Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
    config = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}
    with httpx2.Client(base_url=f"{address['url']}/api/v1", headers=headers, timeout=60) as http:
        body = {"config": {**config, "name": "killed"}, "activate": False}
        assert http.post("/experiments", json=body).status_code == 201
        assert http.post("/experiments/1/kill").status_code == 200
    first = receiver.next()
    process.kill()
    process.wait()
    receiver.answers.clear()
    while not receiver.requests.empty():
        receiver.requests.get()
    process = master_server.start_master(home, "--port", 0, "--slots", 1)
    try:
        again = receiver.next()
        assert again.json()["id"] == first.json()["id"]
        assert again.titles() == ["Experiment 1 (killed) ended: CANCELED"]
    finally:
        process.kill()
        process.wait()
