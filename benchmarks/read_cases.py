"""The cost of reads with a large store: 25 clients over all list and detail routes.

`PACELINE_BENCH_TRIALS` sets the numbers of trials, `1000,10000,100000` if it is not there.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from figures import Figure
from large_store import LargeStore, fill_home

_NUM_CLIENTS = 25
_SECONDS = 30.0
# Before that, the same load, in which the second process of the master starts.
_WARM_UP_S = 5.0
_HEALTH_EVERY_S = 0.02
_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}


@dataclass(frozen=True, slots=True)
class Route:
    """A kind of request: the path of one, and its body if it is a POST."""

    name: str
    path: Callable[[random.Random, LargeStore], str]
    body: Callable[[random.Random, LargeStore], bytes] | None = None


def _experiment(rest: str) -> Callable[[random.Random, LargeStore], str]:
    def path(chosen: random.Random, store: LargeStore) -> str:
        # The wide one in each third request, so that its size shows in the upper percentiles.
        is_wide = chosen.random() < 1 / 3
        number = store.wide if is_wide else chosen.randint(1, store.num_experiments)
        return f"experiments/{number}{rest}"

    return path


def _trial(rest: str) -> Callable[[random.Random, LargeStore], str]:
    return lambda chosen, store: f"trials/{chosen.randint(1, store.num_trials)}{rest}"


def _fixed(path: str) -> Callable[[random.Random, LargeStore], str]:
    return lambda _chosen, _store: path


def _series_body(chosen: random.Random, store: LargeStore) -> bytes:
    trial = chosen.randint(1, store.num_trials // 100) * 100
    wanted = {"trial_id": trial, "group": "training", "name": "loss"}
    return json.dumps({"series": [wanted]}).encode()


def _checkpoint(chosen: random.Random, store: LargeStore) -> str:
    return f"checkpoints/{chosen.randint(1, store.num_trials):08d}-0000-4000-8000-000000000000"


ROUTES = (
    Route("/experiments", _fixed("experiments?brief=true")),
    Route("/experiments by metric", _fixed("experiments?brief=true&sort_by=best_metric&order=asc")),
    Route("/experiments by name", _fixed("experiments?brief=true&sort_by=name&order=asc")),
    Route("/experiments found", lambda c, s: f"experiments?brief=true&search={c.randint(1, 9999)}"),
    Route("/experiment-columns", _fixed("experiment-columns")),
    Route("/experiments/N", _experiment("")),
    Route("/experiments/N/config", _experiment("/config")),
    Route("/experiments/N/loss", _experiment("/loss")),
    Route("/experiments/N/metric-names", _experiment("/metric-names")),
    Route("/experiments/N/trials", _experiment("/trials")),
    Route("/experiments/N/trials by metric", _experiment("/trials?sort_by=metric")),
    Route("/experiments/N/trials by steps", _experiment("/trials?sort_by=steps&order=desc")),
    Route("/experiments/N/checkpoints", _experiment("/checkpoints")),
    Route("/experiments/N/checkpoints by metric", _experiment("/checkpoints?sort_by=metric")),
    Route("/experiments/N/hyperparameters", _experiment("/hyperparameters?limit=1000")),
    Route("/experiments/N/search", _experiment("/search?limit=200")),
    Route("/experiments/N/logs", _experiment("/logs?tail=100")),
    Route("/trials/N", _trial("")),
    Route("/trials/N/time", _trial("/time")),
    Route("/trials/N/metrics", _trial("/metrics?limit=200")),
    Route("/trials/N/checkpoints", _trial("/checkpoints")),
    Route("/trials/N/logs", lambda _c, s: f"trials/{s.logged}/logs?tail=200"),
    Route("/metric-series", _fixed("metric-series"), _series_body),
    Route("/checkpoints/U", _checkpoint),
    Route("/master", _fixed("master")),
    Route("/slots", _fixed("slots")),
    Route("/queue", _fixed("queue")),
)
SEARCHES = ("illegal memory access", "0x1e240", "no such words", "loss=0.99999", "K9")


def measure_reads() -> list[Figure]:
    """25 clients over all list and detail routes, at several sizes."""
    sizes = os.environ.get("PACELINE_BENCH_TRIALS", "1000,10000,100000").split(",")
    figures = []
    for size in map(int, sizes):
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory) / "home"
            store = fill_home(home, num_trials=size)
            figures += measure_store(home, store)
    return figures


def measure_store(home: Path, store: LargeStore) -> list[Figure]:
    """Measure the reads of one store, under load and each route by itself."""
    at = f"{store.num_experiments:,} experiments, {store.num_trials:,} trials"
    with master_of(home) as client:
        cost = {route.name: client.cpu_ms(route, store) for route in ROUTES}
        searches = [client.seconds_of_search(store, text) for text in SEARCHES]
        times, num_requests, seconds = asyncio.run(_load(client, store))
        processes = [client.process, *client.process.children()]
        memory = sum(process.memory_info().rss for process in processes) / 2**20
    health = times.pop("/health")
    slowest = max(times, key=lambda name: percentile(times[name], 95))
    raw = {
        name: {"cpu_ms": cost[name], **{f"p{p}": percentile(found, p) for p in (50, 95, 99)}}
        for name, found in times.items()
    }
    return [
        Figure(what=f"requests over all routes, 25 clients: {at}", unit="requests/s",
               values=[num_requests / seconds], bar=400, is_smaller_better=False,
               beside=f"{store.num_points:,} points"),
        Figure(what=f"95 % of the slowest route's requests: {at}", unit="ms",
               values=[percentile(times[slowest], 95)], bar=100, beside=slowest, raw=raw),
        Figure(what=f"99 % of `/health`'s requests: {at}", unit="ms",
               values=[percentile(health, 99)], bar=50),
        Figure(what=f"master under reads, resident: {at}", unit="MiB", values=[memory], bar=500),
        Figure(what=f"log search over {store.num_lines:,} lines, the slowest text", unit="s",
               values=[max(searches)], bar=0.3,
               beside=", ".join(f"{t!r}: {s:.3f}" for t, s in zip(SEARCHES, searches, strict=True)),
               raw=dict(zip(SEARCHES, searches, strict=True))),
    ]  # fmt: skip


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile of the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True, slots=True)
class ReadClient:
    """Requests to one master, and its process."""

    port: int
    token: str
    process: psutil.Process

    def request(self, path: str, body: bytes | None = None) -> bytes:
        """Return a request as bytes."""
        head = (
            f"{'GET' if body is None else 'POST'} /api/v1/{path} HTTP/1.1\r\n"
            f"Host: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {self.token}\r\n"
        )
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + (body or b"")

    def cpu_ms(self, route: Route, store: LargeStore, num_requests: int = 20) -> float:
        """Return the processor time of the master for a request, in milliseconds."""
        return asyncio.run(self._cpu_ms(route, store, num_requests))

    async def _cpu_ms(self, route: Route, store: LargeStore, num_requests: int) -> float:
        chosen = random.Random(3)
        connection = await asyncio.open_connection("127.0.0.1", self.port)
        await exchange(connection, self.request_of(route, chosen, store))
        before = self.process.cpu_times()
        for _ in range(num_requests):
            await exchange(connection, self.request_of(route, chosen, store))
        after = self.process.cpu_times()
        connection[1].close()
        spent = after.user + after.system - before.user - before.system
        return spent * 1000 / num_requests

    def request_of(self, route: Route, chosen: random.Random, store: LargeStore) -> bytes:
        """Return a request of a route."""
        body = None if route.body is None else route.body(chosen, store)
        return self.request(route.path(chosen, store), body)

    def seconds_of_search(self, store: LargeStore, text: str) -> float:
        """Return how long one search of the long log takes."""

        async def search() -> float:
            connection = await asyncio.open_connection("127.0.0.1", self.port)
            began = time.perf_counter()
            wanted = f"trials/{store.logged}/logs?search={text.replace(' ', '%20')}"
            await exchange(connection, self.request(wanted))
            connection[1].close()
            return time.perf_counter() - began

        return asyncio.run(search())


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def exchange(connection: Streams, request: bytes) -> int:
    """Send a request, read its answer and return how many bytes the body has."""
    reader, writer = connection
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{request.splitlines()[0]!r} was answered {head.splitlines()[0]!r}.")
    [line] = [one for one in head.lower().split(b"\r\n") if one.startswith(b"content-length:")]
    size = int(line.partition(b":")[2])
    await reader.readexactly(size)
    return size


async def _load(client: ReadClient, store: LargeStore) -> tuple[dict[str, list[float]], int, float]:
    """Let the clients ask for a while; return milliseconds by route, and the number in all."""
    times: dict[str, list[float]] = defaultdict(list)
    measured_from = time.perf_counter() + _WARM_UP_S
    until = measured_from + _SECONDS

    def note(name: str, began: float) -> None:
        if began >= measured_from:
            times[name].append((time.perf_counter() - began) * 1000)

    async def ask(number: int) -> None:
        chosen = random.Random(number)
        connection = await asyncio.open_connection("127.0.0.1", client.port, limit=2**24)
        while time.perf_counter() < until:
            route = chosen.choice(ROUTES)
            request = client.request_of(route, chosen, store)
            began = time.perf_counter()
            await exchange(connection, request)
            note(route.name, began)
        connection[1].close()

    async def ask_health() -> None:
        connection = await asyncio.open_connection("127.0.0.1", client.port)
        while time.perf_counter() < until:
            began = time.perf_counter()
            await exchange(connection, client.request("health"))
            note("/health", began)
            await asyncio.sleep(_HEALTH_EVERY_S)
        connection[1].close()

    await asyncio.gather(ask_health(), *map(ask, range(_NUM_CLIENTS)))
    num_requests = sum(len(found) for name, found in times.items() if name != "/health")
    return times, num_requests, time.perf_counter() - measured_from


@contextmanager
def master_of(home: Path) -> Iterator[ReadClient]:
    """Serve a home."""
    command = [sys.executable, "-m", "paceline.cli", "up", "--port", "0", "--slots", "2"]
    process = subprocess.Popen(
        [*command, "--home", str(home)], stdout=subprocess.DEVNULL, env=_ENVIRONMENT
    )
    try:
        while not (home / "master.json").exists():
            assert process.poll() is None, "the master ended at its start"
            time.sleep(0.02)
        address = json.loads((home / "master.json").read_text())
        token = (home / "token").read_text().strip()
        yield ReadClient(address["port"], token, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(60)


NAMED_CASES: dict[str, Callable[[], list[Figure]]] = {"reads": measure_reads}


if __name__ == "__main__":
    # The cost of each route alone: read_cases.py HOME NUM_TRIALS.
    size = int(sys.argv[2])
    kept = LargeStore(num_experiments=size // 10, num_trials=size, num_points=0, wide=size // 10,
                      logged=size, num_lines=0)  # fmt: skip
    with master_of(Path(sys.argv[1])) as asking:
        for one in ROUTES:
            print(f"{asking.cpu_ms(one, kept):8.1f} ms  {one.name}", flush=True)
