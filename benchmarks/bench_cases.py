"""The cases of `run.py`: each measures something that Paceline promises."""

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figures import Figure

_MASTER_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}


def measure_report() -> list[Figure]:
    """One `report_training_metrics()` in the training process, beside a plain JSON line."""
    code = """
import json, os, statistics, sys, tempfile, time
os.chdir(tempfile.mkdtemp())
import paceline.core as core
metrics = {"loss": 0.123456, "accuracy": 0.5, "learning_rate": 1e-3}
line_file = open("lines.jsonl", "ab", buffering=0)
ours, plain = [], []
with core.init(name="bench") as context:
    report = context.train.report_training_metrics
    for step in range(1, 20001):
        begin = time.perf_counter_ns(); report(step, metrics)
        middle = time.perf_counter_ns()
        line = json.dumps({"step": step, "time": time.time(), **metrics})
        line_file.write(line.encode() + b"\\n")
        end = time.perf_counter_ns()
        ours.append(middle - begin); plain.append(end - middle)
print(statistics.median(ours) / 1000, statistics.median(plain) / 1000)
"""
    rounds = [_run_python(code).split() for _ in range(5)]
    plain = statistics.median(float(words[1]) for words in rounds)
    return [
        Figure(
            what="one `report_training_metrics()`, 3 values, median of 20,000",
            unit="us",
            values=[float(words[0]) for words in rounds],
            bar=10,
            beside=f"`json.dumps` and an unbuffered write: {plain:.2f} us",
        )
    ]


def measure_start() -> list[Figure]:
    """Whole processes: import, `core.init()` and the command line."""
    commands = {
        "bare": [sys.executable, "-c", "pass"],
        "import": [sys.executable, "-c", "import paceline"],
        "init": [
            sys.executable,
            "-c",
            "import paceline as p, sys\nwith p.core.init(name='b'): pass\n"
            "assert 'torch' not in sys.modules",
        ],
        "help": [str(Path(sys.executable).with_name("paceline")), "--help"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as directory:
        for round_number in range(12):
            for name, command in commands.items():
                begin = time.perf_counter()
                subprocess.run(
                    command, check=True, stdout=subprocess.DEVNULL, cwd=directory,
                    env=_MASTER_ENVIRONMENT, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                if round_number:  # the first one warms the file cache
                    times[name].append((time.perf_counter() - begin) * 1000)
    beside = f"`python -c pass`: {statistics.median(times['bare']):.0f} ms"
    return [
        Figure(what="`import paceline`, whole process", unit="ms", values=times["import"], bar=150,
               beside=beside),
        Figure(what="`core.init()` entered and left, whole process, no torch", unit="ms",
               values=times["init"], bar=300, beside=beside),
        Figure(what="`paceline --help`, whole process", unit="ms", values=times["help"], bar=300,
               beside=beside),
    ]  # fmt: skip


def measure_ingest() -> list[Figure]:
    """Metric points through the HTTP route into SQLite: 16 trials, 10 keys, one client."""
    with start_master(num_slots=16) as (_home, call):
        config = {
            "entrypoint": "sleep 600",
            "searcher": {"name": "random", "metric": "k0", "max_trials": 16},
        }
        experiment = call("POST", "experiments", {"config": config})
        attempts = _running_attempts(call, experiment["id"])
        rates = []
        for round_number in range(6):
            begin = time.perf_counter()
            for attempt_id in attempts:
                call("POST", f"attempts/{attempt_id}/records", _reports(round_number))
            rates.append(len(attempts) * 10_000 / (time.perf_counter() - begin))
        page = call("GET", "trials/16/metrics?group=training&limit=1000")
        assert len(page["items"]) == 1000
        assert len(page["items"][0]["metrics"]) == 10
        summary = call("GET", "trials/16")["summary"]["training"]
        assert summary["k3"]["count"] == 6000
        call("POST", f"experiments/{experiment['id']}/kill")
    return [
        Figure(what="metric points stored through HTTP into SQLite, one client", unit="points/s",
               values=rates[1:], bar=100_000, is_smaller_better=False,
               beside="1,000 reports of 10 keys a request, readable after the answer"),
    ]  # fmt: skip


def measure_decisions() -> list[Figure]:
    """Validation reports that a search decides on, through the HTTP route into SQLite."""
    with start_master(num_slots=16) as (_home, call):
        searcher = {
            "name": "async_halving", "metric": "k0", "max_trials": 16, "time_metric": "steps",
            "max_time": 10**9, "num_rungs": 5,
        }  # fmt: skip
        experiment = call(
            "POST", "experiments", {"config": {"entrypoint": "sleep 600", "searcher": searcher}}
        )
        attempts = _running_attempts(call, experiment["id"])
        rates = []
        for round_number in range(4):
            begin = time.perf_counter()
            for attempt_id in attempts:
                call("POST", f"attempts/{attempt_id}/records", _validations(round_number))
            rates.append(len(attempts) * 250 / (time.perf_counter() - begin))
        assert call("GET", "trials/16")["summary"]["validation"]["k0"]["count"] == 1000
        call("POST", f"experiments/{experiment['id']}/kill")
    return [
        Figure(what="reports that a halving search decides on, through HTTP into SQLite", unit="/s",
               values=rates[1:], bar=5000, is_smaller_better=False,
               beside="16 trials, 250 reports a request, stored with each input"),
    ]  # fmt: skip


def measure_requests() -> list[Figure]:
    """Requests one after the other, as runners send them: over a connection that is kept."""
    num_requests = 200
    with start_master(num_slots=1) as (home, call):
        file = json.loads((home / "master.json").read_text())
        token = (home / "token").read_text().strip()
        connection = http.client.HTTPConnection("127.0.0.1", file["port"])
        config = {"entrypoint": "sleep 600", "searcher": {"name": "single", "metric": "k0"}}
        experiment = call("POST", "experiments", {"config": config})
        [attempt_id] = _running_attempts(call, experiment["id"], num_trials=1)
        path, body = f"attempts/{attempt_id}/logs", json.dumps({"entries": []}).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        kept: list[float] = []
        opened: list[float] = []
        for _ in range(6):
            begin = time.perf_counter()
            for _ in range(num_requests):
                connection.request("POST", f"/api/v1/{path}", body, headers)
                assert json.loads(connection.getresponse().read())["last_sequence"] >= -1
            middle = time.perf_counter()
            for _ in range(num_requests):
                call("POST", path, body)
            kept.append((middle - begin) * 1000 / num_requests)
            opened.append((time.perf_counter() - middle) * 1000 / num_requests)
        connection.close()
        call("POST", f"experiments/{experiment['id']}/kill")
    return [
        Figure(what="one small request over a kept connection", unit="ms", values=kept[1:], bar=3,
               beside=f"a connection per request: {statistics.median(opened[1:]):.2f} ms")
    ]  # fmt: skip


def measure_trials() -> list[Figure]:
    """16 trials that report once, through the whole master, beside the same 16 processes alone."""
    script = (
        "import paceline as det\n"
        "with det.core.init() as context:\n"
        "    context.train.report_validation_metrics(1, {'loss': 0.5})\n"
    )
    times, alone = [], []
    with tempfile.TemporaryDirectory() as directory:
        context = Path(directory) / "context"
        context.mkdir()
        (context / "train.py").write_text(script)
        config = Path(directory) / "random.yaml"
        config.write_text(
            "entrypoint: python3 train.py\n"
            "searcher: {name: random, metric: loss, max_trials: 16, max_concurrent_trials: 16}\n"
        )
        with start_master(num_slots=2) as (_home, call):
            for _ in range(4):
                digest = upload_code(call, context)
                begin = time.perf_counter()
                body = {
                    "config": {
                        "entrypoint": "python3 train.py",
                        "searcher": {"name": "random", "metric": "loss", "max_trials": 16},
                    },
                    "context_digest": digest,
                }
                experiment = call("POST", "experiments", body)
                path = f"experiments/{experiment['id']}"
                while call("GET", path)["state"] != "COMPLETED":
                    time.sleep(0.02)
                times.append(time.perf_counter() - begin)
                alone.append(_run_pairs(context))
    beside = f"the same script 16 times, two at once, no master: {statistics.median(alone):.2f} s"
    return [
        Figure(what="16 trivial trials through the master, 2 slots", unit="s", values=times[1:],
               bar=1, beside=beside),
    ]  # fmt: skip


def measure_memory() -> list[Figure]:
    """Resident memory of a master that has nothing to do."""
    import psutil

    values = []
    for _ in range(3):
        with start_master(num_slots=2) as (home, _call):
            time.sleep(2)
            pid = json.loads((home / "master.json").read_text())["pid"]
            values.append(psutil.Process(pid).memory_info().rss / 2**20)
    return [Figure(what="idle master, resident", unit="MiB", values=values, bar=150)]


CASES: dict[str, Callable[[], list[Figure]]] = {
    "report": measure_report,
    "start": measure_start,
    "ingest": measure_ingest,
    "decisions": measure_decisions,
    "requests": measure_requests,
    "trials": measure_trials,
    "memory": measure_memory,
}

Call = Callable[..., Any]


def _run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        env=_MASTER_ENVIRONMENT,
    ).stdout  # fmt: skip


@contextmanager
def start_master(num_slots: int) -> Iterator[tuple[Path, Call]]:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        command = [sys.executable, "-m", "paceline.cli", "up", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--slots", str(num_slots), "--home", str(home)],
            stdout=subprocess.DEVNULL, env=_MASTER_ENVIRONMENT,
        )  # fmt: skip
        try:
            while not (home / "master.json").exists():
                assert process.poll() is None, "the master ended at its start"
                time.sleep(0.02)
            url = json.loads((home / "master.json").read_text())["url"]
            token = (home / "token").read_text().strip()
            yield home, lambda method, path, body=None: _call(url, token, method, path, body)
        finally:
            process.terminate()
            process.wait(60)


def _call(url: str, token: str, method: str, path: str, body: Any) -> Any:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{url}/api/v1/{path}", data=data, method=method,
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request) as response:
        content = response.read()
    return json.loads(content) if content else None


def _running_attempts(call: Call, experiment_id: int, num_trials: int = 16) -> list[int]:
    """Wait until all trials of a master's first experiment run, and return their attempts."""
    while call("GET", f"experiments/{experiment_id}")["num_running"] < num_trials:
        time.sleep(0.1)
    trial_ids = range(1, num_trials + 1)
    return [call("GET", f"trials/{trial_id}")["attempts"][0]["id"] for trial_id in trial_ids]


def _validations(round_number: int) -> bytes:
    records = []
    for step in range(250 * round_number + 1, 250 * (round_number + 1) + 1):
        record = {"type": "metrics", "time": 1.0, "group": "validation", "steps_completed": step}
        records.append([step, record | {"metrics": {"k0": 1 / step, "steps": step}}])
    batch = {"generation": 1, "rank": 0, "records": records}
    return json.dumps({"batches": [batch]}).encode()


def _reports(round_number: int) -> bytes:
    records = []
    for index in range(1000):
        step = round_number * 1000 + index
        values = {f"k{key}": index * 0.001 + key for key in range(10)}
        record = {"type": "metrics", "time": 1.0, "group": "training", "steps_completed": step}
        records.append([step, record | {"metrics": values}])
    # The trials' own processes report nothing, so another generation's journal is free.
    batch = {"generation": 1, "rank": 0, "records": records}
    return json.dumps({"batches": [batch]}).encode()


def upload_code(call: Call, directory: Path) -> str:
    import hashlib
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path in sorted(directory.iterdir()):
            tar.add(path, path.name)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    call("PUT", f"contexts/{digest}", content)
    return digest


def _run_pairs(context: Path) -> float:
    with tempfile.TemporaryDirectory() as directory:
        begin = time.perf_counter()
        for _ in range(8):
            pair = [
                subprocess.Popen(
                    [sys.executable, str(context / "train.py")], cwd=directory,
                    env=_MASTER_ENVIRONMENT, stderr=subprocess.DEVNULL,
                )
                for _ in range(2)
            ]  # fmt: skip
            for process in pair:
                process.wait()
        return time.perf_counter() - begin
