"""Clients of other trackers, and Paceline's own, at once.

`python benchmarks/run.py log-clients`: sixteen scripts of each kind log ten values once a second to
Paceline, as trainings do; W&B's client is told to send each second, not every 15. A relay before
the master takes the times of its answers, so that a client's own work does not count. All begin at
once and end at once, which is told apart.

`log-threads`: MLflow's client, in sixteen threads, logs to Paceline and to MLflow's own server: as
fast as it can and once a second. All that was logged is read again.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from figures import Figure

NUM_CLIENTS = 16
NUM_KEYS = 10
SERVE = Path(__file__).parents[1] / "tests" / "clients" / "run_mlflow.py"
_NUM_CALLS = 50
_SECONDS = 30
_SETTLE_S = 3
_ANSWER_BAR_MS = 50
# Each begins a run, logs once, waits for its word, and logs on.
SCRIPTS = {
    "wandb": """
import wandb
run = wandb.init(project="clients", name=name, settings=wandb.Settings(
    silent=True, x_file_stream_transmit_interval=1))
log, end = (lambda step: run.log(values)), run.finish
""",
    "mlflow": """
import mlflow
mlflow.start_run(run_name=name)
log, end = (lambda step: mlflow.log_metrics(values, step=step)), mlflow.end_run
""",
    "paceline": """
import paceline
paceline.init(name=name)
log, end = (lambda step: paceline.log(values, step=step)), paceline.finish
""",
}
_LOG = f"""
log(0)
print("READY", flush=True)
sys.stdin.readline()
for step in range(1, {_SECONDS} + 1):
    due = time.perf_counter() + 1
    log(step)
    time.sleep(max(0.0, due - time.perf_counter()))
print("READY", flush=True)
sys.stdin.readline()
end()
"""


def measure_clients() -> list[Figure]:
    """Measure scripts of each client against Paceline."""
    return [_measure_scripts(client) for client in SCRIPTS]


def measure_threads() -> list[Figure]:
    """Measure MLflow's client against Paceline and MLflow's own server."""
    figures = []
    servers = {"Paceline": paceline_server, "MLflow's own server": mlflow_server}
    for case, num_calls, every_s in (
        ("as fast as they can", _NUM_CALLS, 0.0),
        ("once a second", _SECONDS, 1.0),
    ):
        found = {}
        for name, serve in servers.items():
            with serve() as url:
                found[name] = _measure_threads(url, num_calls, every_s)
        ours, theirs = found.values()
        figures.append(
            Figure(
                what=f"16 threads of MLflow's client, {case}: answers", unit="ms",
                values=ours.pop("times_ms"), bar=None, raw=ours,
                beside=f"Paceline: {_told(ours)}; MLflow's own server: {_told(theirs)}",
            )
        )  # fmt: skip
    return figures


def _measure_scripts(client: str) -> Figure:
    """The answers that sixteen scripts of one client get."""
    num_logged = NUM_CLIENTS * NUM_KEYS * (_SECONDS + 1)
    with paceline_server() as url, ExitStack() as stack:
        token, _, address = url.removeprefix("http://api:").partition("@")
        relay = stack.enter_context(Relay.serve(int(address.rpartition(":")[2])))
        here = f"127.0.0.1:{relay.port}"
        told = {"WANDB_BASE_URL": f"http://{here}", "WANDB_API_KEY": token}
        told |= {"MLFLOW_TRACKING_URI": f"http://api:{token}@{here}"}
        told |= {"PACELINE_REPORT_TO": f"http://{here}", "PACELINE_TOKEN": token}
        scripts = []
        for number in range(NUM_CLIENTS):
            code = f"import sys, time\nname = 'client-{number}'\n"
            code += f"values = {{f'm{{k}}': k / 3 for k in range({NUM_KEYS})}}\n"
            code += SCRIPTS[client] + _LOG
            script = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, env=os.environ | told,
                cwd=stack.enter_context(tempfile.TemporaryDirectory()),
            )  # fmt: skip
            scripts.append(stack.enter_context(script))
        parts = []
        for _ in range(2):
            _wait_for_scripts(scripts)
            # Clients send files of a beginning in the background.
            time.sleep(_SETTLE_S)
            parts.append(relay.take())
            for script in scripts:
                assert script.stdin is not None
                script.stdin.write("go\n")
                script.stdin.flush()
                # They log evenly spread over a second.
                time.sleep(0 if parts[1:] else 1 / NUM_CLIENTS)
        assert [script.wait() for script in scripts] == [0] * NUM_CLIENTS
        parts.append(relay.take())
        share_kept = _num_kept(f"http://{address}", token) / num_logged
    begin, logging, end = (quantiles(times_ms, n=20)[-1] for times_ms in parts)
    found = _shape(parts[1], _SECONDS) | {"share_kept": share_kept}
    return Figure(
        what=f"16 scripts of {client} log once a second: 95th percentile of an answer", unit="ms",
        values=[logging], bar=_ANSWER_BAR_MS, raw=found,
        beside=f"{_told(found)}; all begin at once: {begin:.0f} ms, all end at once: {end:.0f} ms",
    )  # fmt: skip


def _wait_for_scripts(scripts: list["subprocess.Popen[str]"]) -> None:
    for script in scripts:
        assert script.stdout is not None
        while script.stdout.readline().strip() != "READY":
            assert script.poll() is None, "a script ended too early"


def _num_kept(url: str, token: str) -> int:
    """Return how many of the values that scripts have logged a master has."""

    def get(path: str) -> list[dict[str, Any]]:
        request = urllib.request.Request(
            f"{url}/api/v1/{path}", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request) as reply:
            return list(json.load(reply)["items"])

    names = {f"m{key}" for key in range(NUM_KEYS)}
    trials = [
        trial["id"]
        for experiment in get("experiments")
        for trial in get(f"experiments/{experiment['id']}/trials")
    ]
    rows = [row for trial in trials for row in get(f"trials/{trial}/metrics?group=training")]
    return sum(len(names & row["metrics"].keys()) for row in rows)


class Relay:
    """Door before a server that takes the time from each request to the first of its answer."""

    def __init__(self, upstream: int) -> None:
        self._times_ms: list[float] = []
        self.port = 0
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()

    @classmethod
    @contextmanager
    def serve(cls, upstream: int) -> Iterator["Relay"]:
        """Relay to a port of this machine, from a thread."""
        relay = cls(upstream)
        server = relay._loop.run_until_complete(
            asyncio.start_server(relay._join, "127.0.0.1", 0, backlog=256)
        )
        relay.port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=relay._loop.run_forever)
        thread.start()
        yield relay
        relay._loop.call_soon_threadsafe(relay._loop.stop)
        thread.join()

    def take(self) -> list[float]:
        """Return the milliseconds of the answers since the last call."""
        taken, self._times_ms = self._times_ms, []
        return taken

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        asked = [0.0]

        async def forward() -> None:
            while data := await reader.read(1 << 16):
                asked[0] = time.perf_counter()
                up_writer.write(data)
            up_writer.write_eof()

        task = asyncio.ensure_future(forward())
        with suppress(OSError):
            while data := await up_reader.read(1 << 16):
                if asked[0]:
                    self._times_ms.append((time.perf_counter() - asked[0]) * 1000)
                    asked[0] = 0.0
                writer.write(data)
        task.cancel()
        writer.close()
        up_writer.close()


def _measure_threads(url: str, num_calls: int, every_s: float) -> dict[str, Any]:
    """Log with all of MLflow's clients at once; return what their calls took.

    Args:
        url: The server.
        num_calls: How often each client logs.
        every_s: Seconds from one call of a client to its next; the clients begin evenly spread. A
            call counts from when it was due. With 0 each follows the answer to the one before.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(url)
    run_ids = [client.create_run("0").info.run_id for _ in range(NUM_CLIENTS)]

    def log(run_id: str) -> list[float]:
        times = []
        first = began + every_s * run_ids.index(run_id) / NUM_CLIENTS
        for step in range(num_calls):
            metrics = [Metric(f"m{key}", step, 1000 + step, step) for key in range(NUM_KEYS)]
            due = first + step * every_s
            time.sleep(max(0.0, due - time.perf_counter()))
            due = due if every_s else time.perf_counter()
            client.log_batch(run_id, metrics)
            times.append((time.perf_counter() - due) * 1000)
        return times

    began = time.perf_counter()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        times_ms = [one for part in pool.map(log, run_ids) for one in part]
    found = _shape(times_ms, time.perf_counter() - began)
    kept = sum(
        len(client.get_metric_history(run_id, f"m{key}"))
        for run_id in run_ids
        for key in (0, NUM_KEYS - 1)
    )
    return found | {"share_kept": kept / (2 * NUM_CLIENTS * num_calls), "times_ms": times_ms}


def _shape(times_ms: list[float], seconds: float) -> dict[str, float]:
    return {
        "median_ms": round(median(times_ms), 1),
        "p95_ms": round(quantiles(times_ms, n=20)[-1], 1),
        "answers": len(times_ms),
        "answers_per_s": round(len(times_ms) / seconds, 1),
    }


def _told(found: dict[str, Any]) -> str:
    return (
        f"median {found['median_ms']} ms, 95th percentile {found['p95_ms']} ms,"
        f" {found['answers']} answers, {found['answers_per_s']} a second,"
        f" {found['share_kept']:.2%} of the values kept"
    )


@contextmanager
def paceline_server() -> Iterator[str]:
    """Serve a new master."""
    program = [sys.executable, str(SERVE), "serve"]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write("new\n")
        server.stdin.flush()
        yield server.stdout.readline().strip()
        server.stdin.close()


@contextmanager
def mlflow_server() -> Iterator[str]:
    """Serve MLflow's own server on a new SQLite database, with its default workers."""
    with tempfile.TemporaryDirectory() as scratch:
        program = [sys.executable, "-m", "mlflow", "server", "--port", "18571",
                   "--backend-store-uri", f"sqlite:///{scratch}/mlflow.db"]  # fmt: skip
        environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
        server = subprocess.Popen(
            program, cwd=scratch, env=environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        url = "http://127.0.0.1:18571"
        try:
            _wait_for(f"{url}/health", server)
            yield url
        finally:
            os.killpg(server.pid, 15)
            server.wait()


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url):
            return
        time.sleep(0.2)
    raise RuntimeError("MLflow's server ended before it answered.")
