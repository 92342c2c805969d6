"""MLflow's client against Paceline and against MLflow's own server, in one run.

    python benchmarks/clients.py [CALLS [SECONDS]]

Sixteen clients at once log ten metrics a call, each to a run of its own: first as fast as they can,
then once a second, as trainings do, for SECONDS. Printed are the median and the 95th percentile of
an answer, calls a second, and how many values came back.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles

from mlflow import MlflowClient
from mlflow.entities import Metric

NUM_CLIENTS = 16
NUM_KEYS = 10
SERVE = Path(__file__).parents[1] / "tests" / "clients" / "run_mlflow.py"


def main() -> None:
    """Measure both, one after the other and then once more in the other order."""
    num_calls, seconds = (*map(int, sys.argv[1:]), *(50, 30)[len(sys.argv) - 1 :])
    servers = {"paceline": paceline_server, "mlflow": mlflow_server}
    for name in ("paceline", "mlflow", "mlflow", "paceline"):
        with servers[name]() as url:
            for case, calls, every_s in (("closed", num_calls, 0.0), ("open", seconds, 1.0)):
                found = measure(url, calls, every_s)
                print(json.dumps({"server": name, "case": case, **found}), flush=True)


def measure(url: str, num_calls: int, every_s: float) -> dict[str, float]:
    """Log with all clients at once; return what their calls took, in milliseconds.

    Args:
        url: The server.
        num_calls: How often each client logs.
        every_s: Seconds from one call of a client to its next; the clients begin evenly spread. A
            call counts from when it was due. With 0 each follows the answer to the one before.
    """
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
        times = [one for part in pool.map(log, run_ids) for one in part]
    seconds = time.perf_counter() - began
    kept = sum(
        len(client.get_metric_history(run_id, f"m{key}"))
        for run_id in run_ids
        for key in (0, NUM_KEYS - 1)
    )
    return {
        "median_ms": round(median(times), 1),
        "p95_ms": round(quantiles(times, n=20)[-1], 1),
        "calls_per_s": round(len(times) / seconds, 1),
        "share_kept": kept / (2 * NUM_CLIENTS * num_calls),
    }


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


if __name__ == "__main__":
    main()
