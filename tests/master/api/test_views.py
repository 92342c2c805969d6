"""What the web UI reads: curves, configurations, code and the queue."""

import gzip
import hashlib
import io
import math
import tarfile
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest


def item(http: httpx2.Client, path: str, **query: Any) -> Any:
    reply = http.get(path, params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_many_series_come_in_the_order_asked_for(master: Any) -> None:
    master.create()
    master.schedule()
    losses = [0.5, {"$float": "nan"}, 0.25, 0.125]
    master.report(1, 0, *[("training", n, {"loss": v}) for n, v in enumerate(losses, 1)])
    master.report(2, 0, ("training", 5, {"loss": 1, "epoch": 2}))
    asked = [
        {"trial_id": 2, "group": "training", "name": "loss"},
        {"trial_id": 1, "group": "training", "name": "loss", "after_step": 1},
        {"trial_id": 9, "group": "training", "name": "loss"},
    ]
    reply = master.http.post("/metric-series", json={"series": asked})
    assert reply.status_code == 200, reply.text
    second, first, none = reply.json()["series"]
    assert (second["x"], second["y"], second["last_step"]) == ([5.0], [1.0], 5)
    assert first == {
        "trial_id": 1, "group": "training", "name": "loss", "x": [2.0, 3.0, 4.0],
        "y": [None, 0.25, 0.125], "steps": [2, 3, 4], "num_points": 3, "num_gaps": 1,
        "last_step": 4, "is_sampled": False,
    }  # fmt: skip
    assert (none["x"], none["last_step"]) == ([], -1)
    by_epoch = {"series": asked[:1], "x": "epoch", "x_min": 0, "x_max": 9}
    assert master.http.post("/metric-series", json=by_epoch).json()["series"][0]["x"] == [2.0]
    names = item(master.http, "/experiments/1/metric-names")["items"]
    assert [one["name"] for one in names] == ["epoch", "loss"]


def test_a_smoothed_series_is_that_of_all_its_points(master: Any) -> None:
    """Whatever is asked for of it: fewer points, what is new, a part, or another x axis."""
    master.create()
    master.schedule()
    losses: list[Any] = [math.sin(n) for n in range(600)]
    losses[10] = {"$float": "nan"}
    reports = [("training", n, {"loss": v, "down": -n}) for n, v in enumerate(losses)]
    master.report(1, 0, *reports)
    one = {"trial_id": 1, "group": "training", "name": "loss"}

    def smoothed(of: dict[str, int], **asked: Any) -> dict[int, float | None]:
        body = {"series": [one | of], "smoothing_steps": 25.0} | asked
        reply = master.http.post("/metric-series", json=body)
        assert reply.status_code == 200, reply.text
        (series,) = reply.json()["series"]
        return dict(zip(series["steps"], series["smoothed"], strict=True))

    whole = smoothed({})
    assert len(whole) == 600
    assert whole[10] is None
    assert max(abs(value) for step, value in whole.items() if step > 100 and value) < 0.1
    for part in (
        smoothed({}, max_points=40),
        smoothed({"after_step": 590}),
        smoothed({}, x_min=300, x_max=310),
        smoothed({"after_step": 590}, x="down"),
    ):
        assert 0 < len(part) < 100
        assert part == pytest.approx({step: whole[step] for step in part})
    assert sorted(smoothed({"after_step": 590})) == list(range(591, 600))


@pytest.mark.parametrize("steps", [0, -1, "much"])
def test_a_smoothing_without_extent_is_refused(master: Any, steps: Any) -> None:
    body = {
        "series": [{"trial_id": 1, "group": "training", "name": "loss"}],
        "smoothing_steps": steps,
    }
    assert master.http.post("/metric-series", json=body).status_code == 422


def test_the_time_of_a_trial_adds_up_and_goes_on_while_it_runs(master: Any) -> None:
    master.create()
    master.schedule()
    queued = item(master.http, "/trials/1/time")
    assert queued["goodput"] is None or queued["undivided_s"] == 0
    now = time.time()
    records = [
        (0, {"time": now, "event": "start", "steps_completed": 0, "seconds": {}}),
        (1, {"time": now, "event": "report", "steps_completed": 5, "seconds": {"later": 1.0}}),
    ]
    batch = [(number, {"type": "time_spent", **record}) for number, record in records]
    body = [{"generation": 0, "rank": 0, "records": batch}]
    assert master.attempt(1, "records", batches=body).status_code == 200
    first, second = (item(master.http, "/trials/1/time") for _ in range(2))
    shares = [name for name in first if name.endswith("_s") and name != "total_s"]
    assert sum(first[name] for name in shares) == pytest.approx(first["total_s"])
    assert first["undivided_s"] == 0
    assert 0 < first["training_s"] < second["training_s"]
    assert first["start_s"] == second["start_s"]
    assert master.http.get("/trials/99/time").status_code == 404


@pytest.fixture
def coded(master: Any) -> Any:
    """Return a master with an experiment whose code has a page, a text and a binary file."""
    packed = io.BytesIO()
    files = {"train.py": b"print(1)", "web/page.html": b"<script>1</script>", "data.bin": b"\xff\0"}
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    body = gzip.compress(packed.getvalue())
    digest = hashlib.sha256(body).hexdigest()
    assert master.http.put(f"/contexts/{digest}", content=body).status_code == 204
    text = "entrypoint: python3 train.py\nsearcher: {name: single, metric: loss}\n"
    config = {"entrypoint": "python3 train.py", "searcher": {"name": "single", "metric": "loss"}}
    sent = {"config": config, "submitted_config": text, "context_digest": digest}
    assert master.http.post("/experiments", json=sent).status_code == 201
    return master


def test_code_is_told_as_text_whatever_its_name(coded: Any) -> None:
    listed = item(coded.http, "/experiments/1/files")
    assert [(one["path"], one["size"]) for one in listed] == [
        ("data.bin", 2), ("train.py", 8), ("web/page.html", 18)
    ]  # fmt: skip
    page = coded.http.get("/experiments/1/files/web/page.html")
    assert page.text == "<script>1</script>"
    assert page.headers["content-type"] == "text/plain; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    binary = coded.http.get("/experiments/1/files/data.bin")
    assert binary.headers["content-type"] == "application/octet-stream"
    for path in ("none.py", "web", "..%2Ftoken"):
        assert coded.http.get(f"/experiments/1/files/{path}").status_code == 404


def test_a_configuration_is_told_as_submitted_and_as_resolved(coded: Any) -> None:
    told = item(coded.http, "/experiments/1/config")
    assert told["submitted"].startswith("entrypoint: python3 train.py\n")
    assert told["resolved"]["max_restarts"] == 5
    assert "\nmax_restarts: 5\n" in told["resolved_yaml"]


@pytest.mark.parametrize(
    ("text", "line", "path", "message"),
    [
        ("entrypoint: a\nsearcher:\n  name: single\n  metrics: x\n", 4, "searcher.metrics", "met"),
        ("entrypoint: a\nsearcher:\n  name: guess\n", 3, "searcher.name", "single"),
        ("a: 1\na: 2", 2, "", "stands twice"),
        ("a: {b: 1\nc: 2", 2, "", "`config` must be valid YAML"),
        ("- a", None, "", "map"),
    ],
)
def test_a_wrong_configuration_is_told_with_its_lines(
    master: Any, text: str, line: int | None, path: str, message: str
) -> None:
    reply = master.http.post("/check-config", json={"text": text})
    assert reply.status_code == 200, reply.text
    problems = {one["path"]: one for one in reply.json()["problems"]}
    assert problems[path]["line"] == line
    assert message in problems[path]["message"]


@pytest.mark.parametrize(
    ("first", "line", "message"),
    [
        ("entrypoint: a", 7, "at most 200,000 values"),
        # The text is read once more for the lines of its problems.
        ("entrypoint: 1", 7, "at most 200,000 values"),
    ],
)
def test_a_configuration_whose_aliases_expand_without_bound_is_refused(
    master: Any, first: str, line: int, message: str
) -> None:
    lines = [first, "a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 9) + "]" for n in range(1, 9)]
    reply = master.http.post("/check-config", json={"text": "\n".join(lines)})
    [problem] = reply.json()["problems"]
    assert (problem["line"], problem["path"]) == (line, "")
    assert message in problem["message"]


def test_a_right_configuration_has_no_problems(master: Any) -> None:
    text = "entrypoint: a\nsearcher: {name: single, metric: loss}\n"
    told = master.http.post("/check-config", json={"text": text}).json()
    assert (told["problems"], told["config"]["entrypoint"]) == ([], "a")
    assert "searcher" in item(master.http, "/config-schema")["properties"]


def test_a_directory_that_is_not_there_is_told_to_who_may_name_one(
    master: Any, tmp_path: Path
) -> None:
    start = "entrypoint: a\nsearcher: {name: single, metric: loss}\n"

    def warnings(directory: Path, http: httpx2.Client = master.http) -> list[str]:
        text = f"{start}environment: {{working_dir: {directory}}}\n"
        reply = http.post("/check-config", json={"text": text})
        assert reply.status_code == 200, reply.text
        return reply.json()["warnings"]

    assert warnings(tmp_path) == []
    [told] = warnings(tmp_path / "gone")
    assert f"but {tmp_path / 'gone'} is none on the master's machine" in told
    # Others could learn which directories there are.
    assert master.http.post("/users", json={"name": "eve", "role": "editor"}).status_code == 201
    token = {"name": "of-eve", "scope": "admin", "user": "eve"}
    secret = master.http.post("/tokens", json=token).json()["secret"]
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx2.Client(base_url=master.url, headers=headers, verify=False) as stranger:
        assert warnings(tmp_path / "gone", stranger) == []


def test_the_queue_tells_why_each_trial_waits(master: Any) -> None:
    def create(num_slots: int, max_slots: int | None = None, max_trials: int = 1) -> None:
        resources = {"slots_per_trial": num_slots, "max_slots": max_slots}
        searcher = {"name": "random", "metric": "loss", "max_trials": max_trials}
        master.create(resources=resources, searcher=searcher)

    create(1, max_slots=1, max_trials=2)
    assert [one["reason"] for one in item(master.http, "/queue")] == ["starting", "max_slots"]
    master.schedule()
    create(2)
    create(1)
    queue = item(master.http, "/queue")
    assert [(one["trial_id"], one["reason"]) for one in queue] == [
        (2, "max_slots"), (3, "slots_in_use"), (4, "behind_others")
    ]  # fmt: skip
    assert queue[1]["detail"] == "It waits until 2 of 2 slots are free."
    assert item(master.http, "/queue", limit=1) == queue[:1]
