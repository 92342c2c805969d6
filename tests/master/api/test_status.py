"""What the master tells of itself."""

import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline import __version__

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "operations.md"


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the numbers of an exposition, read by Prometheus' own library."""
    families = list(text_string_to_metric_families(text))
    assert all(family.type != "unknown" and family.documentation for family in families)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_and_status_tell_what_is_stored_and_asked(make_master: Any) -> None:
    master = make_master(num_slots=1)
    master.core.measurements.slow_request_s = 60.0  # longer than on a busy machine
    master.create()
    master.schedule()
    now = time.time()
    record = {"type": "metrics", "time": now - 7, "group": "training", "steps_completed": 1,
              "metrics": {"loss": 0.5, "lr": 1.0}}  # fmt: skip
    batch = {"generation": 0, "rank": 0, "records": [[0, record]]}
    assert master.attempt(1, "records", batches=[batch]).status_code == 200
    for _ in range(3):
        master.http.get("/experiments/1")
    master.http.get("/experiments/77")
    master.http.get('/no"such\\route')
    master.http.get("/slots", headers={"Authorization": "Bearer wrong"})
    reply = master.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(reply.text)

    def value(name: str, **labels: str) -> float | None:
        return found.get((name, frozenset(labels.items())))

    route = "/api/v1/experiments/{experiment_id}"
    count = "paceline_http_requests_total"
    assert value(count, method="GET", route=route, status="200") == 3
    assert value(count, method="GET", route=route, status="404") == 1
    # Whatever is asked for, paths without a route and refusals make few series.
    assert value(count, method="*", route="other", status="404") == 1
    assert value(count, method="*", route="other", status="401") == 1
    assert value("paceline_http_request_seconds_count", route=route) == 4
    assert value("paceline_http_request_seconds_bucket", route=route, le="+Inf") == 4
    assert value("paceline_trials", state="ACTIVE") == 2
    assert value("paceline_attempts", state="RUNNING") == 1
    assert value("paceline_queue_trials") == 1
    assert value("paceline_metric_points") == 2
    rows = re.findall(r"^\| (`(?:paceline|process)_.*?) \|", GUIDE.read_text(), re.MULTILINE)
    named = {*re.findall(r"\w+", " ".join(rows))}
    # The endings are those of histograms.
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in found}
    assert [name for name in sorted(shown) if name not in named] == []
    assert (value("paceline_slots_used"), value("paceline_slots_drained")) == (1, 0)
    assert 7 <= (value("paceline_ingest_newest_lag_seconds") or 0) < 300
    assert value("paceline_connections", kind="known") == 1
    assert (value("paceline_home_bytes", part="database") or 0) > 0
    assert (value("process_resident_memory_bytes") or 0) > 2**20

    status = master.http.get("/status").json()
    assert (status["num_waiting"], status["trials"]) == (1, {"ACTIVE": 2})
    assert (status["num_slots_used"], status["num_metric_points"]) == (1, 2)
    assert status["problems"] == []
    master.http.post("/experiments/1/pause")
    assert master.http.get("/status").json()["num_waiting"] == 0


def test_a_slow_request_is_logged_without_its_query_and_counted(
    make_master: Any, caplog: pytest.LogCaptureFixture
) -> None:
    master = make_master()
    with caplog.at_level(logging.WARNING, "paceline._cluster.master.api.request_limits"):
        # Longer than on a busy machine.
        master.core.measurements.slow_request_s = 60.0
        master.http.get("/slots?secret=one")
        # What waits for a change, and what waits for a stream, is not slow.
        master.create()
        master.schedule()
        master.core.measurements.slow_request_s = 0.05
        master.http.get("/attempts/1/control", params={"after": 99, "timeout_s": 0.1})
        assert caplog.records == []
        master.core.measurements.slow_request_s = 1e-9
        master.http.get("/slots?secret=two")
        master.core.measurements.slow_request_s = 60.0
    [record] = caplog.records
    assert record.getMessage().startswith("A slow request: GET /api/v1/slots was answered 200")
    assert "secret" not in record.getMessage()
    [problem] = master.http.get("/status").json()["problems"]
    assert problem.startswith("1 request took longer than 60 s")


def test_metrics_are_at_their_usual_path_for_those_who_may_read(master: Any) -> None:
    base = f"http://127.0.0.1:{master.port}"
    with httpx2.Client(base_url=base, timeout=60, verify=False) as http:
        assert http.get("/metrics").status_code == 401
        reply = http.get("/metrics", headers=master.headers)
    assert samples(reply.text)["paceline_info", frozenset({("version", __version__)})] == 1


def test_sizes_of_directories_are_measured_beside_the_requests(master: Any) -> None:
    (master.home.logs_path / "trial-9").mkdir()
    (master.home.logs_path / "trial-9" / "attempt-1.jsonl").write_bytes(b"x" * 1000)
    master.core.sizes.read()
    for thread in threading.enumerate():
        if thread.name == "home-sizes":
            thread.join(60)
    assert master.http.get("/status").json()["sizes"]["logs"] == 1000
