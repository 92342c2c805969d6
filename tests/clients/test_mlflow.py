"""The client of MLflow, unchanged, against a real master; and requests that it never sends.

`make test-clients` runs earlier releases of it, and MLflow's own tests.
"""

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import pytest
from optional_modules import Needed

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("faults", "clients"))

from cut_once import CutOnce
from fault_lab.masters import MasterProcess
from forked_processes import free_ports
from small_trainings import LIBRARIES

Needed("mlflow", "NOT TESTED: needs MLflow")

PROXY = "/api/2.0/mlflow-artifacts/artifacts"


class MlflowServer:
    """A master as MLflow's client sees it."""

    def __init__(self, process: MasterProcess, **variables: str) -> None:
        self.process = process.start(**variables)
        address = json.loads((process.home / "master.json").read_text())
        self.url: str = address["url"].removesuffix("/api/v1")
        self.token = (process.home / "token").read_text().strip()
        self.http = httpx2.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=60
        )

    def send(self, path: str, **body: Any) -> httpx2.Response:
        """Send a call whose arguments are a body."""
        return self.http.post(f"/api/2.0/mlflow/{path}", json=body)

    def call(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the answer of such a call."""
        return _answer(self.send(path, **body))

    def ask(self, path: str, **query: Any) -> dict[str, Any]:
        """Return the answer of a call whose arguments are in its URL."""
        return _answer(self.http.get(f"/api/2.0/mlflow/{path}", params=query))

    def get(self, path: str, **query: Any) -> Any:
        """Return the answer of a route of the master."""
        return _answer(self.http.get(f"/api/v1/{path}", params=query))

    def begin(self, **more: Any) -> str:
        """Begin a run, and return its id."""
        run = self.call("runs/create", **{"experiment_id": "0", **more})["run"]
        return str(run["info"]["run_id"])

    def metrics(self, run_id: str) -> dict[str, Any]:
        """Return the last values of a run."""
        run = self.ask("runs/get", run_id=run_id)["run"]
        return {one["key"]: one["value"] for one in run["data"]["metrics"]}

    def history(self, run_id: str, key: str) -> list[tuple[int, Any]]:
        """Return steps and values of a metric."""
        found = self.ask("metrics/get-history", run_id=run_id, metric_key=key)["metrics"]
        return [(one["step"], one["value"]) for one in found]

    def make_token(self, scope: str) -> str:
        """Return a new token."""
        name = f"{scope}-{time.monotonic_ns()}"
        reply = self.http.post("/api/v1/tokens", json={"name": name, "scope": scope})
        return str(_answer(reply)["secret"])

    def trial(self, run_id: str) -> dict[str, Any]:
        """Return the trial of the newest run with a name, which is its id."""
        experiments = self.get("experiments", search=run_id)["items"]
        trials = self.get(f"experiments/{experiments[0]['id']}/trials")["items"]
        return dict(trials[0]) | {"experiment": experiments[0]}


def _answer(reply: httpx2.Response) -> dict[str, Any]:
    assert reply.status_code in (200, 201), reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, master_server: Any) -> Iterator[MlflowServer]:
    """Return a master for all tests."""
    home = tmp_path_factory.mktemp("mlflow") / "home"
    served = MlflowServer(MasterProcess(home, 0, server=master_server))
    yield served
    served.http.close()
    served.process.close()


Script = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_script(tmp_path: Path, clean_environment: dict[str, str]) -> Iterator[Script]:
    """Return a function that starts a script with MLflow's client, told only URL and token."""
    started = []

    def start(server: MlflowServer, script: str, **variables: str) -> "subprocess.Popen[str]":
        told = {"MLFLOW_TRACKING_URI": server.url, "MLFLOW_TRACKING_TOKEN": server.token}
        told |= {"HOME": str(tmp_path), "MLFLOW_DISABLE_TELEMETRY": "true"}
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            cwd=tmp_path, text=True, env=clean_environment | told | variables,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for a script, and return what it printed."""
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return output


# ---- the client itself ---------------------------------------------------------------------------


@pytest.mark.long
def test_script_logs_everything_and_reads_it_back(
    tmp_path: Path, master_server: Any, clean_environment: dict[str, str]
) -> None:
    """What the script checks is what its own server would answer; here is what people see of it."""
    served = MlflowServer(MasterProcess(tmp_path / "home", 0, server=master_server))
    try:
        url = served.url.replace("//", f"//api:{served.token}@")
        script = Path(__file__).with_name("mlflow_script.py")
        subprocess.run(
            [sys.executable, str(script), url], check=True, cwd=tmp_path,
            env=clean_environment | {"HOME": str(tmp_path)}, capture_output=True, timeout=200,
        )  # fmt: skip
        trial = served.trial("first")
        assert trial["experiment"]["labels"] == ["project:lines"]
        assert trial["experiment"]["state"] == "COMPLETED"
        assert trial["hparams"] == {"lr": 0.1, "layers": 3, "name": "x"}
        rows = served.get(f"trials/{trial['id']}/metrics", group="training")["items"]
        assert [row["metrics"].get("accuracy") for row in rows] == [0.0, 0.1, 0.2, 0.3, 0.4]
    finally:
        served.http.close()
        served.process.close()


@pytest.mark.long
def test_run_goes_on_over_a_restart_of_the_master(
    tmp_path: Path, master_server: Any, start_script: Script
) -> None:
    """The client tries again; what it sent twice is there once."""
    script = """
        import mlflow
        with mlflow.start_run(run_name="restarted") as run:
            print(run.info.run_id, flush=True)
            for step in range(60):
                mlflow.log_metric("loss", step, step=step)
                print(step, flush=True)
                if step in (20, 21):
                    input()
    """
    port = free_ports(1)
    options = ("--port", str(port))
    process = MasterProcess(tmp_path / "home", 0, *options, server=master_server)
    served = MlflowServer(process)
    try:
        # Often rather than with long pauses, so that the test takes less time.
        retries = {"MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1"}
        running = start_script(served, script, **retries)
        assert running.stdin is not None
        assert running.stdout is not None
        run_id = running.stdout.readline().strip()
        while running.stdout.readline().strip() != "20":
            assert running.poll() is None
        process.kill()
        running.stdin.write("\n\n")
        running.stdin.flush()
        process.start()
        finish(running)
        assert served.history(run_id, "loss") == [(step, step) for step in range(60)]
        assert served.ask("runs/get", run_id=run_id)["run"]["info"]["status"] == "FINISHED"
    finally:
        served.http.close()
        process.close()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mib", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_artifact_of_a_client_that_is_cut_on_its_way_arrives_whole_or_not_at_all(
    server: MlflowServer, start_script: Script, mib: int
) -> None:
    size = mib * 2**20
    script = """
        import os, pathlib, mlflow
        content = os.urandom(int(os.environ["SIZE"]))
        pathlib.Path("big.bin").write_bytes(content)
        with mlflow.start_run() as run:
            try:
                mlflow.log_artifact("big.bin")
            except Exception:
                assert mlflow.artifacts.list_artifacts(run_id=run.info.run_id) == []
                mlflow.log_artifact("big.bin")
            got = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, dst_path="got")
        assert pathlib.Path(got, "big.bin").read_bytes() == content
    """
    with CutOnce(httpx2.URL(server.url).port or 80, size * 3 // 10) as proxy:
        finish(start_script(server, script, MLFLOW_TRACKING_URI=proxy.url, SIZE=str(size)))

        assert proxy.is_cut


@pytest.mark.long
def test_unknown_release_of_the_client_logs(server: MlflowServer, start_script: Script) -> None:
    script = """
        import mlflow
        from mlflow.tracking.request_header import default_request_header_provider as headers
        headers._DEFAULT_HEADERS |= {"User-Agent": "mlflow-python-client/99.0.0",
                                     "X-MLflow-Client-Version": "99.0.0"}
        mlflow.set_experiment("future")
        with mlflow.start_run(run_name="future"):
            mlflow.log_metric("loss", 1.0)
    """
    finish(start_script(server, script))

    assert server.trial("future")["experiment"]["state"] == "COMPLETED"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_libraries_that_log_by_themselves_log_here(
    server: MlflowServer, start_script: Script
) -> None:
    """Autologging of Transformers and Lightning, and Lightning's logger; the words are theirs."""
    script = (
        LIBRARIES
        + """
        import mlflow
        from lightning.pytorch.loggers import MLFlowLogger
        mlflow.set_experiment("auto")
        mlflow.transformers.autolog()
        fit_transformers("mlflow", run_name="hf")
        mlflow.end_run()
        mlflow.pytorch.autolog(log_every_n_step=1, log_models=False)
        with mlflow.start_run(run_name="pl"):
            fit_lightning(False)
        mlflow.pytorch.autolog(disable=True)
        fit_lightning(MLFlowLogger("auto", run_name="logged", log_model=True))
    """
    )
    finish(start_script(server, textwrap.dedent(script)))

    for name, metric in (("hf", "loss"), ("pl", "train_loss"), ("logged", "train_loss")):
        trial = server.trial(name)
        assert trial["experiment"]["state"] == "COMPLETED", name
        rows = server.get(f"trials/{trial['id']}/metrics", group="training")["items"]
        assert sum(metric in row["metrics"] for row in rows) >= 2, (name, rows)
        assert trial["hparams"], name
    files = server.get(f"trials/{trial['id']}/files")["items"]
    assert any(file["path"].endswith(".ckpt") for file in files)


@pytest.mark.long
def test_client_says_why_its_token_is_refused(server: MlflowServer, start_script: Script) -> None:
    revoked = server.make_token("submit")
    newest = server.get("tokens")[-1]["id"]
    assert server.http.delete(f"/api/v1/tokens/{newest}").is_success
    script = """
        import os, sys
        from mlflow import MlflowClient
        for token in sys.stdin.read().split():
            os.environ["MLFLOW_TRACKING_TOKEN"] = token
            try:
                MlflowClient().create_run("0")
            except Exception as error:
                print(error)
    """
    process = start_script(server, script)
    tokens = f"paceline_wrong\n{revoked}\n{server.make_token('read')}"
    output, errors = process.communicate(tokens, timeout=120)
    wrong, of_revoked, of_reader = output.splitlines() or [errors]
    assert wrong.startswith("UNAUTHENTICATED: The token of a request must be known to the master")
    assert of_revoked.startswith("UNAUTHENTICATED: The token 'submit-")
    assert of_reader.startswith(
        "PERMISSION_DENIED: The token must have the scope 'submit' to write"
    )


# ---- rights --------------------------------------------------------------------------------------


def test_token_that_only_reports_logs_and_reads_its_run_but_lists_nothing(
    server: MlflowServer,
) -> None:
    server.begin()
    reporter = {"Authorization": f"Bearer {server.make_token('report')}"}

    def send(path: str, **body: Any) -> httpx2.Response:
        return server.http.post(f"/api/2.0/mlflow/{path}", json=body, headers=reporter)

    run_id = send("runs/create", experiment_id="0").json()["run"]["info"]["run_id"]
    logged = {"key": "a", "value": 1, "timestamp": 1}
    assert send("runs/log-metric", run_id=run_id, **logged).status_code == 200
    assert server.metrics(run_id) == {"a": 1.0}
    refused = send("runs/search", experiment_ids=["0"])
    assert (refused.status_code, refused.json()["error_code"]) == (403, "PERMISSION_DENIED")


def test_nobody_without_a_token_reads_or_writes(server: MlflowServer) -> None:
    with httpx2.Client(base_url=server.url) as stranger:
        for reply in (
            stranger.post("/api/2.0/mlflow/runs/search", json={"experiment_ids": ["0"]}),
            stranger.get(f"{PROXY}/0/x/artifacts/a"),
            stranger.put(f"{PROXY}/0/x/artifacts/a", content=b"a"),
        ):
            assert (reply.status_code, reply.json()["error_code"]) == (401, "UNAUTHENTICATED")


# ---- values --------------------------------------------------------------------------------------


def test_values_that_json_has_not_are_kept(server: MlflowServer) -> None:
    run_id = server.begin()
    for step, value in enumerate(["NaN", "Infinity", "-Infinity", 1e308, 2**62, -0.5]):
        server.call("runs/log-metric", run_id=run_id, key="x", value=value, timestamp=9, step=step)
    assert server.history(run_id, "x") == [
        (0, "NaN"), (1, "Infinity"), (2, "-Infinity"), (3, 1e308), (4, 2.0**62), (5, -0.5)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        {"key": "a", "value": "a lot"},
        {"key": "a", "value": int("9" * 400)},
        {"key": "a", "value": True},
        {"key": "a", "value": 1, "step": 2**63},
        {"key": "a", "value": 1, "step": -1},
        {"key": "a", "value": 1, "timestamp": -1},
        {"key": "a", "value": 1, "timestamp": 2**62},
        {"key": "", "value": 1},
        {"key": "a\ud800", "value": 1},
        {"key": "../a", "value": 1},
        {"key": "x" * 251, "value": 1},
        {"key": ["a"], "value": 1},
        {"key": "a"},
    ],
)
def test_metric_that_cannot_be_is_refused(server: MlflowServer, given: dict[str, Any]) -> None:
    run_id = server.begin()
    body = json.dumps({"run_id": run_id, "timestamp": 1} | given)
    reply = server.http.post("/api/2.0/mlflow/runs/log-metric", content=body)
    assert (reply.status_code, reply.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert server.metrics(run_id) == {}


def test_last_value_is_that_of_the_highest_step_then_time_then_value(server: MlflowServer) -> None:
    run_id = server.begin()
    points = [(1.0, 10, 5), (2.0, 20, 4), (3.0, 9, 5), (0.5, 10, 5), ("NaN", 10, 5)]
    for value, timestamp, step in points:
        server.call(
            "runs/log-metric", run_id=run_id, key="x", value=value, timestamp=timestamp, step=step
        )
    assert server.metrics(run_id) == {"x": 1.0}
    assert len(server.history(run_id, "x")) == len(points)


@pytest.mark.parametrize("number", [5000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_very_many_keys_are_kept_and_read(server: MlflowServer, number: int) -> None:
    run_id = server.begin(run_name=f"{number} keys")
    for start in range(0, number, 1000):
        metrics = [
            {"key": f"k{n}", "value": n, "timestamp": 1, "step": 0}
            for n in range(start, start + 1000)
        ]
        server.call("runs/log-batch", run_id=run_id, metrics=metrics)
    found = server.metrics(run_id)
    assert len(found) == number
    assert found[f"k{number - 1}"] == number - 1
    # What people open does not grow with it.
    trial = server.trial(f"{number} keys")
    reply = server.http.get(f"/api/v1/trials/{trial['id']}")
    assert len(reply.content) < 200_000


def test_two_clients_on_one_run_lose_nothing(server: MlflowServer) -> None:
    run_id = server.begin()

    def log(number: int) -> None:
        for step in range(25):
            metric = {"key": f"m{number}", "value": step, "timestamp": step, "step": step}
            param = {"key": f"p{number}/{step}", "value": "1"}
            server.call("runs/log-batch", run_id=run_id, metrics=[metric], params=[param])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(log, range(2)))
    for number in range(2):
        assert server.history(run_id, f"m{number}") == [(step, step) for step in range(25)]
    assert len(server.ask("runs/get", run_id=run_id)["run"]["data"]["params"]) == 50


def test_batch_with_something_wrong_stores_nothing(server: MlflowServer) -> None:
    run_id = server.begin()
    server.call("runs/log-parameter", run_id=run_id, key="lr", value="1")
    reply = server.send(
        "runs/log-batch", run_id=run_id, params=[{"key": "lr", "value": "2"}],
        metrics=[{"key": "a", "value": 1, "timestamp": 1}], tags=[{"key": "t", "value": "v"}],
    )  # fmt: skip
    assert reply.status_code == 400
    assert "Changing param values is not allowed" in reply.json()["message"]
    run = server.ask("runs/get", run_id=run_id)["run"]["data"]
    assert run["metrics"] == []
    assert all(tag["key"] != "t" for tag in run["tags"])


@pytest.mark.parametrize(
    ("status", "state"), [("FINISHED", "COMPLETED"), ("FAILED", "ERROR"), ("KILLED", "ERROR")]
)
def test_status_is_a_state_here_and_a_run_can_go_on(
    server: MlflowServer, status: str, state: str
) -> None:
    run_id = server.begin(run_name=f"ends {status}")
    server.call("runs/update", run_id=run_id, status=status, end_time=5_000_000_000_000)
    assert server.trial(f"ends {status}")["state"] == state
    server.call("runs/update", run_id=run_id, status="RUNNING")
    assert server.trial(f"ends {status}")["state"] == "ACTIVE"
    server.call("runs/log-metric", run_id=run_id, key="a", value=1, timestamp=1)
    server.call("runs/update", run_id=run_id, status="FINISHED")
    assert server.trial(f"ends {status}")["state"] == "COMPLETED"


def test_system_metrics_are_a_group_of_their_own(server: MlflowServer) -> None:
    run_id = server.begin(run_name="measured")
    key = "system/cpu_utilization_percentage"
    server.call("runs/log-metric", run_id=run_id, key=key, value=7, timestamp=1)
    assert server.metrics(run_id) == {key: 7.0}
    assert server.history(run_id, key) == [(0, 7.0)]
    rows = server.get(f"trials/{server.trial('measured')['id']}/metrics", group="system")["items"]
    assert [row["metrics"] for row in rows] == [{"cpu_utilization_percentage": 7.0}]


# ---- searches ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searched(server: MlflowServer) -> dict[str, str]:
    """Return the ids of three runs in an experiment of their own, by their names, and its id."""
    project = server.call("experiments/create", name="searched")["experiment_id"]
    ids = {"project": project}
    for number, name in enumerate("abc"):
        run_id = server.begin(experiment_id=project, run_name=name, start_time=1000 + number)
        ids[name] = run_id
        server.call("runs/log-parameter", run_id=run_id, key="opt x", value=f"Adam{number}")
        server.call("runs/set-tag", run_id=run_id, key="team.a", value="100% red")
        value = ["NaN", 2.5, -1][number]
        server.call("runs/log-metric", run_id=run_id, key="loss", value=value, timestamp=1)
    server.call("runs/log-parameter", run_id=ids["c"], key="only", value="c")
    dataset = {"name": "mnist", "digest": "d1", "source_type": "s", "source": "x"}
    tags = [{"key": "mlflow.data.context", "value": "train"}]
    server.call("runs/log-inputs", run_id=ids["b"], datasets=[{"tags": tags, "dataset": dataset}])
    server.call("runs/update", run_id=ids["a"], status="FAILED")
    return ids


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "cba"),
        ("metrics.loss > 0", "b"),
        ("metric.loss <= 2.5", "cb"),
        ("metrics.loss != 2.5", "ca"),
        ("params.`opt x` = 'Adam1'", "b"),
        ('params."opt x" LIKE "Adam%"', "cba"),
        ("params.`opt x` LIKE 'a%'", ""),
        ("params.`opt x` ILIKE 'a%_'", "cba"),
        ("params.`opt x` LIKE '%dam2'", "c"),
        ("params.only IS NULL", "ba"),
        ("params.only IS NOT NULL", "c"),
        ("tags.`team.a` = '100% red' and tags.team.a LIKE '%\u0025 red'", "cba"),
        ("attributes.status = 'FAILED'", "a"),
        ("status != 'FAILED'", "cb"),
        ("run_name = 'b' AND start_time >= 1001", "b"),
        ("attributes.`run name` LIKE '_'", "cba"),
        ("created < 1001", "a"),
        ("datasets.name = 'mnist' and dataset.context IN ('train', 'eval')", "b"),
        ("datasets.digest NOT IN ('d1')", ""),
        ("metrics.missing > 0", ""),
    ],
)
def test_filters_find_runs(
    server: MlflowServer, searched: dict[str, str], text: str, names: str
) -> None:
    found = server.call("runs/search", experiment_ids=[searched["project"]], filter=text)
    assert "".join(run["info"]["run_name"] for run in found["runs"]) == names


def test_list_of_run_ids_is_a_filter(server: MlflowServer, searched: dict[str, str]) -> None:
    for comparator, names in (("IN", "ca"), ("NOT IN", "b")):
        text = f"run_id {comparator} ('{searched['a']}', '{searched['c']}')"
        found = server.call("runs/search", experiment_ids=[searched["project"]], filter=text)
        assert "".join(run["info"]["run_name"] for run in found["runs"]) == names


@pytest.mark.parametrize(
    "text",
    [
        "metrics.loss", "metrics.loss >", "metrics.loss > 'a'", "params.a = 1", "params.a > 'b'",
        "metrics.loss > 1 or metrics.loss < 0", "(metrics.loss > 1)", "nothing.x = 'a'",
        "attributes.nothing = 'a'", "metrics.loss IS NULL", "status IN ('a')", "run_id IN ()",
        "run_id IN ('a'", "params.a LIKE", "datasets.size = 'a'", "'a' = 'b'", "params.a = 'b",
        "metrics.loss > 1 and", "and", "; drop table runs", "(" * 9999, "params.a = 'b' AND " * 900,
        "x" * 30_000, "params.a LIKE '" + "%a" * 600 + "'",
    ],
)  # fmt: skip
def test_broken_filter_is_refused(
    server: MlflowServer, searched: dict[str, str], text: str
) -> None:
    reply = server.send("runs/search", experiment_ids=[searched["project"]], filter=text)
    assert (reply.status_code, reply.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


@pytest.mark.parametrize(
    ("order", "names"),
    [
        (["metrics.loss ASC"], "cba"),
        (["metrics.loss DESC"], "bca"),
        (["params.only", "start_time"], "cab"),
        (["attributes.start_time asc"], "abc"),
        (["run_name DESC"], "cba"),
    ],
)
def test_orders_sort_runs_with_nan_and_missing_last(
    server: MlflowServer, searched: dict[str, str], order: list[str], names: str
) -> None:
    found = server.call("runs/search", experiment_ids=[searched["project"]], order_by=order)
    assert "".join(run["info"]["run_name"] for run in found["runs"]) == names


def test_pages_hold_every_run_once(server: MlflowServer, searched: dict[str, str]) -> None:
    names, token = "", None
    while True:
        page = {"max_results": 2} | ({"page_token": token} if token else {})
        found = server.call("runs/search", experiment_ids=[searched["project"]], **page)
        names += "".join(run["info"]["run_name"] for run in found["runs"])
        token = found.get("next_page_token")
        if token is None:
            break
    assert names == "cba"
    reply = server.send("runs/search", experiment_ids=["0"], page_token="not a token")
    assert reply.status_code == 400


# ---- artifacts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "../x", "a/../../x", "%2e%2e/x", "a/%2e%2e/%2e%2e/x", "%252e%252e/x", "a\\..\\x",
        "a%5c..%5cx", "/etc/x", "%2fetc/x", "a//x", "a/./x", "a%00x", "a%0ax", "x/" * 600 + "x",
    ],
)  # fmt: skip
def test_path_that_leads_elsewhere_is_refused(server: MlflowServer, path: str) -> None:
    run_id = server.begin()
    # By hand: an HTTP client tidies paths up.
    connection = HTTPConnection(server.url.removeprefix("http://"))
    headers = {"Authorization": f"Bearer {server.token}"}
    connection.request("PUT", f"{PROXY}/0/{run_id}/artifacts/{path}", b"x", headers)
    reply = connection.getresponse()
    body = json.loads(reply.read())
    connection.close()
    assert (reply.status, body["error_code"]) in (
        (400, "INVALID_PARAMETER_VALUE"), (404, "RESOURCE_DOES_NOT_EXIST"))  # fmt: skip
    assert server.ask("artifacts/list", run_id=run_id)["files"] == []


def test_artifact_that_breaks_off_leaves_nothing(server: MlflowServer) -> None:
    def kept() -> set[Path]:
        return {path for path in (server.process.home / "files").glob("*/*") if path.is_file()}

    run_id, before = server.begin(), kept()
    connection = HTTPConnection(server.url.removeprefix("http://"))
    connection.putrequest("PUT", f"{PROXY}/0/{run_id}/artifacts/model.bin")
    connection.putheader("Authorization", f"Bearer {server.token}")
    connection.putheader("Content-Length", str(10_000_000))
    connection.endheaders()
    connection.send(b"x" * 3_000_000)
    connection.close()
    # The next one of the same run shows that the master is through with it.
    server.http.put(f"{PROXY}/0/{run_id}/artifacts/whole", content=b"whole")
    files = server.ask("artifacts/list", run_id=run_id)["files"]
    assert [file["path"] for file in files] == ["whole"]
    assert all(path.stat().st_size < 3_000_000 for path in kept() - before)


@pytest.mark.parametrize("name", ["page.html", "drawing.svg", "x.js", "über \u2028.html"])
def test_artifact_cannot_act_on_the_masters_origin(server: MlflowServer, name: str) -> None:
    run_id = server.begin()
    path = f"{PROXY}/0/{run_id}/artifacts/"
    if not name.isprintable():
        assert server.http.put(path + name, content=b"<script>").status_code == 400
        return
    assert server.http.put(path + name, content=b"<script>").status_code == 200
    reply = server.http.get(path + name)
    assert reply.content == b"<script>"
    assert reply.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["content-disposition"].startswith("attachment")


def test_logged_image_is_media_with_step_and_name(server: MlflowServer) -> None:
    run_id = server.begin(run_name="pictured")
    name = "images/sample~a+step+3+timestamp+1700000000000+0a-1b.png"
    server.http.put(f"{PROXY}/0/{run_id}/artifacts/{name}", content=b"png")
    twin = name.replace(".png", "+compressed.webp")
    server.http.put(f"{PROXY}/0/{run_id}/artifacts/{twin}", content=b"webp")
    import sqlite3

    with sqlite3.connect(server.process.home / "master.sqlite") as database:
        rows = database.execute("SELECT name, kind, steps_completed, time, files FROM media")
        [(media_name, kind, step, at, files)] = rows.fetchall()
    assert (media_name, kind, step, at) == ("sample/a", "image", 3, 1_700_000_000.0)
    assert [file["path"] for file in json.loads(files)] == [name]


def test_deleted_directory_takes_its_files_along(server: MlflowServer) -> None:
    run_id = server.begin()
    root = f"{PROXY}/0/{run_id}/artifacts"
    for path in ("a/b", "a/c/d", "ab"):
        server.http.put(f"{root}/{path}", content=path.encode())
    listed = _answer(server.http.get(PROXY, params={"path": f"0/{run_id}/artifacts/a"}))["files"]
    assert [(one["path"], one["is_dir"]) for one in listed] == [("b", False), ("c", True)]
    server.http.delete(f"{root}/a")
    assert [one["path"] for one in server.ask("artifacts/list", run_id=run_id)["files"]] == ["ab"]
    assert server.http.get(f"{root}/a/b").json()["error_code"] == "RESOURCE_DOES_NOT_EXIST"


def test_parts_are_refused_in_the_words_that_the_client_knows(server: MlflowServer) -> None:
    from mlflow.exceptions import _UnsupportedMultipartUploadException

    reply = server.http.post("/api/2.0/mlflow-artifacts/mpu/create/0/x/artifacts", json={})
    assert reply.status_code == 501
    assert reply.json()["message"].startswith(_UnsupportedMultipartUploadException.MESSAGE)


@pytest.mark.root
def test_full_disk_refuses_an_artifact_and_keeps_the_run(
    small_disk: Path, master_server: Any
) -> None:
    served = MlflowServer(MasterProcess(small_disk / "home", 0, server=master_server))
    try:
        run_id = served.begin()
        path = f"{PROXY}/0/{run_id}/artifacts/big"
        reply = served.http.put(path, content=b"x" * 2_000_000)
        assert (reply.status_code, reply.json()["error_code"]) == (507, "INTERNAL_ERROR")
        assert "No space left on device" in reply.json()["message"]
        assert served.http.get(path).status_code == 404
        assert served.http.put(path, content=b"x").status_code == 200
    finally:
        served.http.close()
        served.process.close()


@pytest.mark.long
def test_files_beyond_the_limit_of_a_run_are_refused_and_the_client_says_so(
    tmp_path: Path, master_server: Any, start_script: Script
) -> None:
    process = MasterProcess(tmp_path / "home", 0, server=master_server)
    served = MlflowServer(process, PACELINE_MAX_RUN_FILES_MIB="1")
    try:
        script = """
            import mlflow, pathlib
            pathlib.Path("fits.bin").write_bytes(bytes(2**20))
            pathlib.Path("more.bin").write_bytes(bytes(2**22))
            with mlflow.start_run():
                mlflow.log_artifact("fits.bin")
                try:
                    mlflow.log_artifact("more.bin")
                except Exception as error:
                    print(error)
        """
        told = finish(start_script(served, script))
        assert "have reached their limit, PACELINE_MAX_RUN_FILES_MIB" in told
        run_id = served.begin()
        reply = served.http.put(f"{PROXY}/0/{run_id}/artifacts/big", content=bytes(2**20 + 1))
        assert (reply.status_code, reply.json()["error_code"]) == (413, "RESOURCE_LIMIT_EXCEEDED")
        assert served.http.put(f"{PROXY}/0/{run_id}/artifacts/b", content=b"x").status_code == 200
    finally:
        served.http.close()
        served.process.close()


# ---- models --------------------------------------------------------------------------------------


def test_change_of_a_stage_changes_the_model_and_ties_are_sorted_by_name(
    server: MlflowServer,
) -> None:
    for name in ("staged-b", "staged-a"):
        server.call("registered-models/create", name=name)
        server.call("model-versions/create", name=name, source="runs:/1/model")
    model = partial(server.ask, "registered-models/get", name="staged-b")
    before = model()["registered_model"]["last_updated_timestamp"]
    place = {"name": "staged-b", "version": "1", "stage": "Staging"}
    version = server.call("model-versions/transition-stage", **place)["model_version"]
    after = model()["registered_model"]["last_updated_timestamp"]
    assert before < after <= version["last_updated_timestamp"]
    options = {"filter": "name LIKE 'staged-%'", "order_by": "version_number DESC"}
    found = server.ask("model-versions/search", **options)["model_versions"]
    assert [one["name"] for one in found] == ["staged-a", "staged-b"]


def test_location_that_is_a_path_may_have_signs_of_urls(server: MlflowServer) -> None:
    for location in ("/disk/a#b?", "s3://bucket/c?d=e"):
        made = server.call("experiments/create", name=location, artifact_location=location)
        run = server.call("runs/create", experiment_id=made["experiment_id"])["run"]["info"]
        begin, _, end = location.partition("?d")
        assert run["artifact_uri"] == f"{begin}/{run['run_id']}/artifacts{'?d' * bool(end)}{end}"


def test_copy_of_a_model_version_lies_where_that_lies(server: MlflowServer) -> None:
    for name in ("copied", "copy"):
        server.call("registered-models/create", name=name)
    server.call("model-versions/create", name="copied", source="runs:/1/model")
    found = server.call("model-versions/create", name="copy", source="models:/copied/1")
    assert found["model_version"]["source"] == "models:/copied/1"
    place = server.ask("model-versions/get-download-uri", name="copy", version="1")
    assert place == {"artifact_uri": "runs:/1/model"}
    listed = server.ask("model-versions/search", filter="tag.`mlflow.prompt.is_prompt` != 'true'")
    assert {one["name"] for one in listed["model_versions"]} >= {"copied", "copy"}


@pytest.mark.parametrize(
    "source",
    ["/tmp/model", "file:///tmp/model", "http://host/a/../b", "s3://b/..%2fx", "s3://b/%00"],
)
def test_model_version_from_elsewhere_is_refused(server: MlflowServer, source: str) -> None:
    name = f"refused {source.replace('/', '_').replace(':', '_')}"
    server.call("registered-models/create", name=name)
    reply = server.send("model-versions/create", name=name, source=source)
    assert (reply.status_code, reply.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


# ---- what is not served --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["2.0/mlflow/traces", "3.0/mlflow/traces", "2.0/mlflow/gateway/x", "3.0/mlflow/x"]
)
def test_what_is_not_served_says_so(server: MlflowServer, path: str) -> None:
    reply = server.http.post(f"/api/{path}", json={})
    assert (reply.status_code, reply.json()["error_code"]) == (404, "ENDPOINT_NOT_FOUND")
    assert "MLflow's own server" in reply.json()["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'"a"', b"\xff", b"[" * 100_000])
def test_body_that_is_no_object_is_refused(server: MlflowServer, body: bytes) -> None:
    reply = server.http.post("/api/2.0/mlflow/runs/create", content=body)
    assert (reply.status_code, reply.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
