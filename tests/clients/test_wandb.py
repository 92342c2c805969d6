"""The client of W&B, unchanged, against a real master; and requests that it never sends.

`make test-clients` runs earlier releases of it, and W&B's own tests.
"""

import gzip
import json
import math
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from optional_modules import Needed

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("faults", "clients"))

from cut_once import CutOnce
from fault_lab.masters import MasterProcess
from small_trainings import LIBRARIES

Needed("wandb", "NOT TESTED: needs W&B")

UPSERT = """
mutation UpsertBucket($name: String!, $project: String, $config: JSONString, $tags: [String!]) {
  upsertBucket(input: {name: $name, modelName: $project, config: $config, tags: $tags}) {
    bucket { id name displayName config project { name entity { name } } historyLineCount }
    inserted
  }
}
"""
RUN = """
query Run($project: String!, $name: String!) {
  project(name: $project, entityName: "paceline") {
    run(name: $name) {
      displayName
      state config summaryMetrics historyKeys historyLineCount history(minStep: 0, maxStep: 1000)
    }
  }
}
"""


class WandbServer:
    """A master as W&B's client sees it."""

    def __init__(self, process: MasterProcess, **variables: str) -> None:
        self.process = process.start(**variables)
        address = json.loads((process.home / "master.json").read_text())
        self.url: str = address["url"].removesuffix("/api/v1")
        self.token = (process.home / "token").read_text().strip()
        self.http = httpx2.Client(base_url=self.url, auth=("api", self.token), timeout=60)

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """Return the answer of a query or a mutation."""
        reply = self.http.post("/graphql", json={"query": query, "variables": variables})
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def begin(self, name: str, project: str = "raw") -> None:
        """Begin a run."""
        found = self.ask(UPSERT, name=name, project=project)
        assert found["data"]["upsertBucket"]["bucket"]["name"] == name

    def stream(self, name: str, project: str = "raw", **body: Any) -> httpx2.Response:
        """Send a request to a run's file stream."""
        return self.http.post(f"/files/paceline/{project}/{name}/file_stream", json=body)

    def log(self, name: str, offset: int, *rows: dict[str, Any], **more: Any) -> httpx2.Response:
        """Send lines of history."""
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        chunk = {"offset": offset, "content": lines}
        return self.stream(name, files={"wandb-history.jsonl": chunk}, **more)

    def run(self, name: str, project: str = "raw") -> dict[str, Any]:
        """Return a run as the client reads it, with its history as rows."""
        found: dict[str, Any] = self.ask(RUN, project=project, name=name)["data"]["project"]["run"]
        return found | {"history": [json.loads(row) for row in found["history"]]}

    def experiment(self, name: str) -> dict[str, Any]:
        """Return an experiment by its name."""
        reply = self.http.get("/api/v1/experiments", params={"search": name})
        [found] = [each for each in reply.json()["items"] if each["name"] == name]
        return dict(found)

    def get(self, path: str) -> Any:
        """Return the answer of a route of the master."""
        reply = self.http.get(f"/api/v1{path}")
        assert reply.status_code == 200, reply.text
        return reply.json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, master_server: Any) -> Iterator[WandbServer]:
    """Return a master for all tests: each has a project of its own."""
    home = tmp_path_factory.mktemp("wandb") / "home"
    served = WandbServer(MasterProcess(home, 0, server=master_server))
    yield served
    served.http.close()
    served.process.close()


Script = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_script(tmp_path: Path, clean_environment: dict[str, str]) -> Iterator[Script]:
    """Return a function that starts a script with W&B's client, told nothing but URL and key."""
    started = []

    def start(server: WandbServer, script: str, **variables: str) -> "subprocess.Popen[str]":
        told = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.token}
        told |= {"WANDB_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path / "cache")}
        told |= {"WANDB_ERROR_REPORTING": "false", "HOME": str(tmp_path), "WANDB_SILENT": "true"}
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


@pytest.fixture
def run_script(start_script: Script) -> Callable[..., str]:
    """Return a function that runs such a script, and returns what it prints."""

    def run(server: WandbServer, script: str, **variables: str) -> str:
        process = start_script(server, script, **variables)
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        return output

    return run


@pytest.mark.long
def test_step_metrics_of_a_script_are_the_x_axes(
    server: WandbServer, run_script: Callable[..., str]
) -> None:
    """`define_metric` decides by name, or else by the longest prefix; comparisons must agree."""
    script = """
        import os, wandb
        with wandb.init(project="axes", id=os.environ["RUN"]) as run:
            if os.environ["RUN"] != "plain":
                run.define_metric("train/global_step")
                run.define_metric("*", step_metric="train/global_step", step_sync=True)
                run.define_metric("val/*", step_metric="epoch")
                run.define_metric("acc", step_metric="epoch")
                run.define_metric("alone", summary="max")
            for step in range(3):
                run.log({"train/loss": step, "val/loss": step, "acc": step, "alone": -step,
                         "epoch": step // 2, "train/global_step": step * 10})
    """
    run_script(server, script, RUN="axes")
    run_script(server, script, RUN="plain")
    kept = json.loads(server.run("axes", "axes")["summaryMetrics"])
    assert kept["alone"] == {"max": 0}, kept
    wanted = {"train/loss": "train/global_step", "val/loss": "epoch", "acc": "epoch"}
    wanted |= {"epoch": "train/global_step"}
    ids = []
    for name in ("axes", "plain"):
        path = f"/experiments/{server.experiment(server.run(name, 'axes')['displayName'])['id']}"
        [trial] = server.get(f"{path}/trials")["items"]
        ids.append(trial["id"])
        summary = server.get(f"/trials/{trial['id']}")["summary"]
        found = {key: one["x_axis"] for key, one in summary["training"].items() if one["x_axis"]}
        assert found == (wanted if name == "axes" else {}), f"{name}: {found}"
        assert not any(one["x_axis"] for one in summary.get("system", {}).values()), summary
        named = server.get(f"{path}/metric-names")["items"]
        assert {one["name"]: one["x_axis"] for one in named if one["x_axis"]} == found
    for trials, expected in ((ids[:1], wanted), (ids, {})):
        reply = server.http.post("/api/v1/metric-names", json={"trial_ids": trials})
        found = {one["name"]: one["x_axis"] for one in reply.json() if one["x_axis"]}
        assert found == expected, f"{trials}: {found}"


def test_strange_definitions_choose_no_x_axes(server: WandbServer) -> None:
    """A run whose config says nonsense of metrics is kept, and draws along the steps."""
    strange: list[Any] = [
        5, None, [5, None], {"1": "a"},
        [{"1": 5, "5": 99}, {"2": "*", "5": "x"}, {"2": "*", "5": -1}],
        [{"1": "loss", "5": True}, {"1": "loss", "4": ["x"]}, {"2": ["*"], "4": "x"}],
    ]  # fmt: skip
    for number, each in enumerate(strange):
        name = f"strange-{number}"
        config = json.dumps({"_wandb": {"value": {"m": each}}})
        found = server.ask(UPSERT, name=name, project="raw", config=config)
        assert "errors" not in found, found
        assert server.log(name, 0, {"_step": 0, "loss": 1}).status_code == 200
        [trial] = server.get(f"/experiments/{server.experiment(name)['id']}/trials")["items"]
        summary = server.get(f"/trials/{trial['id']}")["summary"]["training"]["loss"]
        assert summary["x_axis"] is None, f"{each}: {summary}"


@pytest.mark.long
def test_script_logs_here_with_url_and_key_alone(
    server: WandbServer, run_script: Callable[..., str]
) -> None:
    """Config, history, summary, output, texts and the exit code arrive, and `Api` reads them."""
    script = """
        import wandb
        config = {"lr": 0.1, "net": {"n": 3}}
        with wandb.init(project="plain", id="p1", name="plain run", config=config, tags=["a"],
                        notes="a note", group="g", job_type="fit") as run:
            run.define_metric("val/*", step_metric="epoch")
            for step in range(5):
                run.log({"loss": 1 / (step + 1), "val/acc": step}, commit=False)
                run.log({"epoch": step, "deep": {"x": step}})
            print("a line of output")
            run.summary["best"] = 7
        api = wandb.Api()
        run = api.run("plain/p1")
        assert (run.state, run.config, run.tags) == ("finished", config, ["a"])
        assert (run.notes, run.group, run.job_type) == ("a note", "g", "fit")
        assert run.summary["best"] == 7 and run.summary["loss"] == 0.2
        rows = list(run.scan_history())
        assert [row["loss"] for row in rows] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5], rows
        assert [row["val/acc"] for row in run.scan_history(keys=["val/acc"])] == [0, 1, 2, 3, 4]
        assert list(run.history()["deep.x"]) == [0, 1, 2, 3, 4]
        assert len(api.runs("plain", filters={"config.lr": 0.1, "tags": "a"})) == 1
        assert len(api.runs("plain", filters={"summary_metrics.loss": {"$lt": 0.1}})) == 0
        assert "config.yaml" in [file.name for file in run.files()]
    """
    run_script(server, script)

    experiment = server.experiment("plain run")
    assert experiment["state"] == "COMPLETED"
    assert experiment["labels"] == ["project:plain", "a", "group:g", "job:fit"]
    [trial] = server.get(f"/experiments/{experiment['id']}/trials")["items"]
    assert trial["hparams"] == {"lr": 0.1, "net": {"n": 3}}
    assert trial["steps_completed"] == 4
    rows = server.get(f"/trials/{trial['id']}/metrics?group=training")["items"]
    assert [row["metrics"]["loss"] for row in rows] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    lines = server.get(f"/trials/{trial['id']}/logs")["items"]
    assert "a line of output" in [line["text"] for line in lines]
    system = server.get(f"/trials/{trial['id']}/metrics?group=system")["items"]
    assert any("memory" in name for name in system[-1]["metrics"])


@pytest.mark.long
def test_failed_script_is_shown_as_failed_with_its_exit_code(
    server: WandbServer, start_script: Script
) -> None:
    process = start_script(
        server,
        """
        import sys, wandb
        wandb.init(project="failed", id="f1", name="failed run").log({"loss": 1.0})
        sys.exit(3)
        """,
    )
    process.communicate(timeout=120)

    experiment = server.experiment("failed run")
    assert process.returncode == 3
    assert experiment["state"] == "ERROR"
    assert experiment["error"] == "The script ended with the exit code 3."
    assert server.run("f1", "failed")["state"] == "failed"


@pytest.mark.long
def test_media_and_artifacts_are_kept_and_come_back(
    server: WandbServer, run_script: Callable[..., str]
) -> None:
    """Media become records with their files; artifacts have versions, aliases, and one content."""
    script = """
        import pathlib, wandb
        import numpy as np, torch
        pathlib.Path("model/sub").mkdir(parents=True)
        pathlib.Path("model/weights.bin").write_bytes(bytes(1000))
        pathlib.Path("model/sub/note.txt").write_text("first")
        pathlib.Path("kept.txt").write_text("kept")
        pathlib.Path("kept.gif").write_bytes(b"GIF89a")
        pathlib.Path("kept.wav").write_bytes(b"RIFF")

        class Figure:
            # The client knows figures of Plotly by the name of their module.
            __module__ = "plotly.graph_objs._figure"
            def to_plotly_json(self):
                return {"data": [], "layout": {}}

        def log(run, **given):
            artifact = wandb.Artifact("model", type="model", **given)
            artifact.add_dir("model")
            return run.log_artifact(artifact, aliases=["best"]).wait()

        with wandb.init(project="media", id="m1", name="media run") as run:
            image = wandb.Image(np.zeros((4, 5, 3), dtype=np.uint8), caption="black")
            run.log({"image": image, "pair": [image, image], "loss": 0.5,
                     "weights": wandb.Histogram(np_histogram=([1, 2], [0.0, 0.5, 1.0])),
                     "page": wandb.Html("<script>alert(1)</script>"),
                     "table": wandb.Table(columns=["a", "b"], data=[[1, "x"], [2, "y"]]),
                     "film": wandb.Video("kept.gif"), "sound": wandb.Audio("kept.wav"),
                     "figure": wandb.Plotly(Figure())}, commit=False)
            model = torch.nn.Linear(2, 1, bias=False)
            run.watch(model, log="all", log_freq=1)
            model(torch.ones(1, 2)).sum().backward()
            run.log({"watched": 1})
            run.save("kept.txt")
            assert log(run, metadata={"accuracy": 0.5}).version == "v0"
            assert log(run).version == "v0"
            pathlib.Path("model/sub/note.txt").write_text("second")
            assert log(run).version == "v1"
        with wandb.init(project="media", id="m2", name="media user") as run:
            used = run.use_artifact("model:v0")
            folder = pathlib.Path(used.download("got"))
            assert (folder / "sub/note.txt").read_text() == "first"
            assert (folder / "weights.bin").read_bytes() == bytes(1000)
            assert used.metadata == {"accuracy": 0.5}
            assert run.use_artifact("model:best").version == "v1"
        api = wandb.Api()
        run = api.run("media/m1")
        run.file("kept.txt").download(root="files")
        assert pathlib.Path("files/kept.txt").read_text() == "kept"
        [row] = run.scan_history()
        assert row["image"]["_type"] == "image-file" and row["image"]["caption"] == "black"
        assert row["weights"] == {"_type": "histogram", "bins": [0.0, 0.5, 1.0], "values": [1, 2]}
        assert row["film"]["_type"] == "video-file" and row["sound"]["_type"] == "audio-file"
        assert row["figure"]["_type"] == "plotly-file"
        gradients = row["gradients/weight"]
        assert sum(gradients["values"]) == 2 and gradients["bins"][0] <= 1 <= gradients["bins"][-1]
        names = [each.name for each in run.logged_artifacts() if each.type == "model"]
        assert sorted(names) == ["model:v0", "model:v1"]
        assert "model:v0" in [a.name for a in api.run("media/m2").used_artifacts()]
        assert [r.id for r in api.artifact("media/model:v0").used_by()] == ["m2"]
        page = next(file for file in run.files() if file.name.endswith(".html"))
        print(page.url)
    """
    url = run_script(server, script).strip()

    [trial] = server.get(f"/experiments/{server.experiment('media run')['id']}/trials")["items"]
    media = server.get(f"/trials/{trial['id']}/media-names")
    kinds = {each["name"]: each["kind"] for each in media}
    assert kinds | {"page": "html", "table": "table", "film": "video", "sound": "audio"} == kinds
    assert [kinds[each] for each in ("figure", "gradients/weight", "parameters/weight")] == [
        "figure", "histogram", "histogram"
    ]  # fmt: skip
    [film] = server.get(f"/trials/{trial['id']}/media?name=film")["items"]
    path = f"/api/v1/trials/{trial['id']}/files/{film['files'][0]['path']}"
    assert server.http.get(path).content == b"GIF89a"

    reply = httpx2.get(url)
    assert "<script>" in reply.text
    assert reply.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert reply.headers["content-disposition"].startswith("attachment")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert httpx2.get(url.replace(".html", ".htm")).status_code == 403
    assert httpx2.put(url, content=b"other").status_code == 403
    assert httpx2.get(url.partition("?")[0]).status_code == 403


@pytest.mark.long
def test_run_goes_on_through_a_killed_master_with_nothing_lost_or_twice(
    tmp_path: Path, master_server: Any, free_port: int, start_script: Script
) -> None:
    process = MasterProcess(tmp_path / "home", 0, "--port", str(free_port), server=master_server)
    server = WandbServer(process)
    client = start_script(
        server,
        """
        import wandb
        with wandb.init(project="raw", id="k1", name="killed") as run:
            for step in range(50):
                run.log({"loss": step})
            print("half", flush=True)
            input()
            for step in range(50, 100):
                run.log({"loss": step})
            print("all", flush=True)
            input()
        """,
        WANDB_CONSOLE="off",
    )
    assert client.stdin is not None
    assert client.stdout is not None
    assert client.stdout.readline() == "half\n"

    process.kill()
    server.http.close()
    client.stdin.write("\n")
    client.stdin.flush()
    assert client.stdout.readline() == "all\n"
    server = WandbServer(process)
    client.communicate("\n", timeout=120)

    found = server.run("k1")
    server.http.close()
    process.close()
    assert found["state"] == "finished"
    assert [row["loss"] for row in found["history"]] == list(range(100))
    assert found["historyLineCount"] == 100


@pytest.mark.long
def test_resumed_run_and_synced_offline_run_are_whole(
    server: WandbServer, run_script: Callable[..., str], tmp_path: Path
) -> None:
    """A resumed run goes on at the next step; an offline run that is synced twice is there once."""
    script = """
        import subprocess, sys, wandb
        for first in (0, 3):
            with wandb.init(project="raw", id="r1", name="resumed", resume="allow") as run:
                assert run.resumed == (first > 0)
                for step in range(first, first + 3):
                    run.log({"loss": step})
        try:
            wandb.init(project="raw", id="r1", resume="never")
        except wandb.errors.UsageError as error:
            assert "already exists" in str(error)
        given = {"project": "raw", "id": "o1", "name": "offline", "config": {"a": 1}}
        with wandb.init(**given, mode="offline") as run:
            for step in range(3):
                run.log({"loss": step})
            folder = run.settings.sync_dir
        for _ in range(2):
            command = [sys.executable, "-m", "wandb", "sync", "--include-synced", folder]
            subprocess.run(command, check=True)
    """
    run_script(server, script)

    resumed, synced = server.run("r1"), server.run("o1")
    assert [row["loss"] for row in resumed["history"]] == list(range(6))
    [trial] = server.get(f"/experiments/{server.experiment('resumed')['id']}/trials")["items"]
    assert trial["num_attempts"] == 2
    assert [row["loss"] for row in synced["history"]] == [0, 1, 2]
    assert (synced["state"], synced["historyLineCount"]) == ("finished", 3)
    assert json.loads(synced["config"])["a"]["value"] == 1


@pytest.mark.long
def test_of_a_damaged_offline_run_what_is_before_the_damage_arrives(
    server: WandbServer, run_script: Callable[..., str]
) -> None:
    script = """
        import pathlib, subprocess, sys, wandb
        with wandb.init(project="raw", id="d2", name="damaged", mode="offline") as run:
            for step in range(500):
                run.log({"loss": step, "text": "x" * 200})
            folder = pathlib.Path(run.settings.sync_dir)
        [file] = folder.glob("*.wandb")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content)
        command = [sys.executable, "-m", "wandb", "sync", folder]
        print(subprocess.run(command, text=True, capture_output=True).stderr)
    """
    output = run_script(server, script, WANDB_SILENT="false")

    losses = [row["loss"] for row in server.run("d2")["history"]]
    assert "checksum mismatch" in output
    assert losses == list(range(len(losses)))
    assert 100 < len(losses) < 400


@pytest.mark.long
def test_two_scripts_that_resume_one_run_at_once_lose_nothing(
    server: WandbServer, start_script: Script
) -> None:
    script = """
        import os, wandb
        with wandb.init(project="raw", id="both", name="both", resume="allow") as run:
            run.log({"begun": 1})
            print("begun", flush=True)
            input()
            for step in range(20):
                run.log({os.environ["KEY"]: step})
    """
    keys = ("first", "second")
    scripts = []
    for key in keys:
        scripts.append(start_script(server, script, KEY=key, WANDB_CONSOLE="off"))
        stdout = scripts[-1].stdout
        assert stdout is not None
        assert stdout.readline() == "begun\n"
        # The next one goes on from what has arrived of this one.
        deadline = time.monotonic() + 120
        while not server.run("both")["history"]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    for process in scripts:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in scripts:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors

    rows = server.run("both")["history"]
    for key in keys:
        assert sorted(row[key] for row in rows if key in row) == list(range(20))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mib", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_artifact_that_is_cut_on_its_way_arrives_whole(
    server: WandbServer, run_script: Callable[..., str], mib: int
) -> None:
    size = mib * 2**20
    script = """
        import os, pathlib, wandb
        content = os.urandom(int(os.environ["SIZE"]))
        pathlib.Path("big.bin").write_bytes(content)
        with wandb.init(project="raw", name="cut on its way") as run:
            artifact = wandb.Artifact("big", type="model")
            artifact.add_file("big.bin")
            run.log_artifact(artifact).wait()
            got = run.use_artifact("big:latest").download("got")
            assert pathlib.Path(got, "big.bin").read_bytes() == content
    """
    with CutOnce(httpx2.URL(server.url).port or 80, size * 3 // 10) as proxy:
        run_script(server, script, WANDB_BASE_URL=proxy.url, SIZE=str(size))

        assert proxy.is_cut


@pytest.mark.long
def test_unknown_release_of_the_client_logs(
    server: WandbServer, run_script: Callable[..., str]
) -> None:
    script = """
        import wandb
        wandb.__version__ = "99.0.0"
        with wandb.init(project="raw", id="future", name="future") as run:
            run.log({"loss": 1.0})
    """
    run_script(server, script)

    assert [row["loss"] for row in server.run("future")["history"]] == [1.0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_libraries_that_log_by_themselves_log_here(
    server: WandbServer, run_script: Callable[..., str]
) -> None:
    """Transformers with `report_to`, and Lightning with its logger; the words are theirs."""
    script = (
        LIBRARIES
        + """
        fit_transformers("wandb", run_name="hf")
        wandb.finish()
        from lightning.pytorch.loggers import WandbLogger
        fit_lightning(WandbLogger(project="pl", name="pl", log_model=True))
        wandb.finish()
    """
    )
    run_script(server, "import wandb\n" + textwrap.dedent(script), WANDB_PROJECT="hf")

    for name, metric, steps in (("hf", "train/loss", 4), ("pl", "train_loss", 8)):
        experiment = server.experiment(name)
        assert experiment["state"] == "COMPLETED"
        [trial] = server.get(f"/experiments/{experiment['id']}/trials")["items"]
        rows = server.get(f"/trials/{trial['id']}/metrics?group=training")["items"]
        values = [row["metrics"][metric] for row in rows if metric in row["metrics"]]
        assert len(values) == steps, rows
    assert trial["hparams"]["lr"] == 0.1
    files = server.get(f"/trials/{trial['id']}/files")["items"]
    assert any(file["path"].endswith("/model.ckpt") for file in files)


@pytest.mark.parametrize(
    ("scope", "message"),
    [(None, "must be known to the master"), ("read", "must have the scope")],
    ids=["unknown", "read"],
)
def test_client_shows_why_a_key_is_refused(
    server: WandbServer, start_script: Script, scope: str | None, message: str
) -> None:
    key = "0" * 40
    if scope is not None:
        key = server.process.client().create_token("reader", scope=scope).secret
    assert "-" not in key
    process = start_script(
        server,
        'import wandb; wandb.init(project="refused", settings=wandb.Settings(init_timeout=60))',
        WANDB_API_KEY=key,
        WANDB_SILENT="false",
    )

    _, errors = process.communicate(timeout=120)

    assert process.returncode != 0
    assert message in errors


@pytest.mark.long
def test_token_that_is_revoked_in_mid_run_ends_the_upload_and_not_the_script(
    server: WandbServer, start_script: Script
) -> None:
    """A key that only reports is told what it may not do; a revoked one is told so."""
    token = server.process.client().create_token("revoked", scope="report")
    process = start_script(
        server,
        """
        import wandb
        with wandb.init(project="revoked", id="v1", name="revoked run") as run:
            try:
                run.use_artifact("model:latest")
            except Exception as error:
                assert "must have the scope 'read'" in str(error), error
            run.log({"loss": 1.0})
            print("logged", flush=True)
            input()
            run.log({"loss": 2.0})
        """,
        WANDB_API_KEY=token.secret,
        WANDB_SILENT="false",
        WANDB_CONSOLE="off",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "logged\n"
    server.process.client().revoke_token("revoked")

    _, errors = process.communicate("\n", timeout=120)

    assert process.returncode == 0, errors
    assert "Fatal error while uploading data" in errors


@pytest.mark.long
@pytest.mark.root
def test_client_waits_on_a_full_disk_until_there_is_room(
    make_small_disk: Callable[..., Path],
    fill_disk: Callable[..., None],
    master_server: Any,
    start_script: Script,
) -> None:
    disk = make_small_disk(size="8m")
    server = WandbServer(MasterProcess(disk / "home", 0, server=master_server))
    try:
        process = start_script(
            server,
            """
            import os, pathlib, wandb
            pathlib.Path("kept.bin").write_bytes(bytes(500_000))
            with wandb.init(project="raw", id="d1", name="full disk") as run:
                print("begun", flush=True)
                input()
                for step in range(20):
                    run.log({"loss": step, "text": os.urandom(5000).hex()})
                run.save("kept.bin")
            """,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        fill_disk(disk)
        process.stdin.write("\n")
        process.stdin.flush()
        log = disk / "home" / "master.log"
        deadline = time.monotonic() + 120
        while server.stream("d1", files={}).status_code != 503:
            assert time.monotonic() < deadline, log.read_text()
        (disk / "filler").unlink()
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        found = server.run("d1")
        assert [row["loss"] for row in found["history"]] == list(range(20))
        trial = server.experiment("full disk")["id"]
        [trial] = server.get(f"/experiments/{trial}/trials")["items"]
        files = server.get(f"/trials/{trial['id']}/files")["items"]
        assert [each["size"] for each in files if each["path"] == "kept.bin"] == [500_000]
    finally:
        server.http.close()
        server.process.close()


@pytest.mark.long
def test_files_beyond_the_limit_of_a_run_are_refused_and_someone_says_so(
    tmp_path: Path,
    master_server: Any,
    start_script: Script,
) -> None:
    """The client shows why an artifact is refused; of a saved file it shows nothing, so we do."""
    process = MasterProcess(tmp_path / "home", 0, server=master_server)
    server = WandbServer(process, PACELINE_MAX_RUN_FILES_MIB="1")
    try:
        client = start_script(
            server,
            """
            import pathlib, wandb
            pathlib.Path("big.bin").write_bytes(bytes(2**20 + 1))
            with wandb.init(project="raw", id="b1", name="limit") as run:
                run.save("big.bin")
                print("saved", flush=True)
                input()
                artifact = wandb.Artifact("model", type="model")
                artifact.add_file("big.bin")
                try:
                    run.log_artifact(artifact).wait()
                except ValueError as error:
                    assert "have reached their limit, PACELINE_MAX_RUN_FILES_MIB" in str(error)
                    print("refused", flush=True)
            """,
            WANDB_CONSOLE="off", WANDB_DISABLE_CODE="true",
        )  # fmt: skip
        assert client.stdout is not None
        assert client.stdout.readline() == "saved\n"
        ask = """
        mutation CreateRunFiles($files: [String!]!) {
          createRunFiles(input: {entityName: "paceline", projectName: "raw", runName: "b1",
                                 files: $files}) { files { name uploadUrl } }
        }
        """
        names = [f"fill-{power}" for power in range(20, -1, -1)]
        for power, file in enumerate(
            server.ask(ask, files=names)["data"]["createRunFiles"]["files"]
        ):
            # What the client has sent takes room too, so this goes on to the last byte.
            httpx2.put(file["uploadUrl"], content=bytes(2 ** (20 - power)))
        output, errors = client.communicate("\n", timeout=120)
        assert client.returncode == 0, errors
        assert output == "refused\n", errors
        [trial] = server.get(f"/experiments/{server.experiment('limit')['id']}/trials")["items"]
        lines = [line["text"] for line in server.get(f"/trials/{trial['id']}/logs")["items"]]
        assert any(
            text.startswith("The file 'big.bin' is left out. A file must have at most")
            and text.endswith("have reached their limit, PACELINE_MAX_RUN_FILES_MIB.")
            for text in lines
        ), lines
    finally:
        server.http.close()
        server.process.close()


# ---- requests in the client's form ------------------------------------------------------------


def test_request_that_is_sent_again_stores_nothing_twice(server: WandbServer) -> None:
    server.begin("again")
    for _ in range(2):
        reply = server.log("again", 0, {"_step": 0, "loss": 1.0}, {"_step": 1, "loss": 2.0})
        assert reply.status_code == 200, reply.text
    for _ in range(2):
        server.log("again", 2, {"_step": 2, "loss": 3.0}, complete=True, exitcode=0)

    found = server.run("again")
    assert [row["loss"] for row in found["history"]] == [1.0, 2.0, 3.0]
    assert (found["state"], found["historyLineCount"]) == ("finished", 3)


def test_gzip_stream_is_unpacked_and_a_bomb_is_refused(server: WandbServer) -> None:
    server.begin("packed")
    chunk = {"offset": 0, "content": [json.dumps({"_step": 0, "loss": 1.0})]}
    body = json.dumps({"files": {"wandb-history.jsonl": chunk}}).encode()
    path, headers = "/files/paceline/raw/packed/file_stream", {"content-encoding": "gzip"}

    replies = [
        server.http.post(path, content=content, headers=headers).status_code
        for content in (
            gzip.compress(body),
            gzip.compress(body)[:-9],
            gzip.compress(bytes(2**26 + 1)),
        )
    ]

    assert replies == [200, 413, 413]
    assert [row["loss"] for row in server.run("packed")["history"]] == [1.0]


def test_values_that_json_or_a_database_lacks_are_stored_as_near_as_can_be(
    server: WandbServer,
) -> None:
    server.begin("odd")
    line = '{"_step": 0, "nan": "NaN", "bare": NaN, "inf": -Infinity, "huge": 1%s, "none": null,'
    line += ' "text": "a\\ud800", "\\udfff": 1, "": 2, "deep": %s}'
    deep = "[" * 100 + "]" * 100
    good = line % ("0" * 400, "[1, null]")

    replies = [
        server.log("odd", 0, good),
        server.log("odd", 1, line % ("0", deep), "no json", "[]"),
    ]

    assert [reply.status_code for reply in replies] == [200, 200]
    [row] = server.run("odd")["history"]
    shown = {key: row[key] for key in row if not key.startswith("_")}
    assert shown == {
        "nan": "NaN", "bare": "NaN", "inf": "-Infinity", "huge": "Infinity", "text": "a?", "?": 1,
        "deep": [1, "null"],
    }  # fmt: skip
    [trial] = server.get(f"/experiments/{server.experiment('odd')['id']}/trials")["items"]
    [stored] = server.get(f"/trials/{trial['id']}/metrics?group=training")["items"]
    assert stored["metrics"]["nan"] == {"$float": "nan"} or math.isnan(stored["metrics"]["nan"])


def test_names_of_metrics_beyond_the_limit_are_left_out_and_the_log_says_so(
    server: WandbServer,
) -> None:
    server.begin("keys")
    for first in range(0, 100_000, 25_000):
        row = {f"k{number:06}": 1.0 for number in range(first, first + 25_000)}
        assert server.log("keys", first // 25_000, row | {"_step": first}).status_code == 200

    found = server.run("keys")
    assert len(found["historyKeys"]["keys"]) == 10_000
    [trial] = server.get(f"/experiments/{server.experiment('keys')['id']}/trials")["items"]
    lines = [line["text"] for line in server.get(f"/trials/{trial['id']}/logs")["items"]]
    assert "15000 values are left out: a run has at most 10,000 names of metrics." in lines


def test_two_clients_that_resume_one_run_lose_nothing(server: WandbServer) -> None:
    server.begin("two")
    server.log("two", 0, {"_step": 0, "loss": 0.0, "_timestamp": 1.0})
    server.log("two", 1, {"_step": 1, "first": 1.0, "_timestamp": 2.0})
    server.log("two", 1, {"_step": 1, "second": 2.0, "_timestamp": 3.0})

    rows = server.run("two")["history"]
    assert [row.get("first") for row in rows] == [None, 1.0]
    assert [row.get("second") for row in rows] == [None, 2.0]


def test_run_that_begins_anew_gets_an_experiment_of_its_own(server: WandbServer) -> None:
    server.begin("anew")
    server.log("anew", 0, {"_step": 0, "loss": 1.0, "_timestamp": 1.0}, complete=True, exitcode=0)
    server.begin("anew")
    server.log("anew", 0, {"_step": 0, "loss": 2.0, "_timestamp": 2.0})

    reply = server.http.get("/api/v1/experiments", params={"search": "anew"})
    assert [each["state"] for each in reply.json()["items"]] == ["ACTIVE", "COMPLETED"]
    assert [row["loss"] for row in server.run("anew")["history"]] == [2.0]


@pytest.mark.parametrize("name", ["../up.txt", "/etc/x", "a/../../b", "a\nb", "a\\b", "x" * 2000])
def test_file_outside_of_the_run_is_refused(server: WandbServer, name: str) -> None:
    server.begin("paths")
    query = """
    mutation CreateRunFiles($files: [String!]!) {
      createRunFiles(input: {entityName: "paceline", projectName: "raw", runName: "paths",
                             files: $files}) { files { name uploadUrl } }
    }
    """
    found = server.ask(query, files=[name])

    assert found["data"] is None
    assert "The path of a file must be relative" in found["errors"][0]["message"]


@pytest.mark.parametrize(
    "query",
    [
        "query Odd { nothing { of { the kind } } viewer { entity unknownField } }",
        'query Odd { project(name: "none") { run(name: "x") { state } } }',
        "mutation Odd { upsertNothing(input: {a: 1}) { b } }",
        "query { viewer { ...Loop } } fragment Loop on User { ...Loop }",
        "{ viewer { " * 40,
        "{ a" * 2000 + "}" * 2000,
        "query Deep { project(name: " + "[" * 1500 + "]" * 1500 + ") { id } }",
        "",
        'query { project(name: ["a"]) { id } }',
        "subscription S { runs }",
    ],
)
def test_graphql_of_another_shape_is_answered(server: WandbServer, query: str) -> None:
    found = server.ask(query)
    assert found["data"] is None or isinstance(found["data"], dict)
    assert found["data"] is not None or found["errors"][0]["message"]


def test_fields_that_are_not_known_are_null_and_the_masters_log_names_them(
    server: WandbServer,
) -> None:
    asked = "query New { viewer { entity fieldOfTomorrow { deep } } routeOfTomorrow(a: 1) { id } }"

    assert server.ask(asked) == {
        "data": {
            "viewer": {"entity": "paceline", "fieldOfTomorrow": None}, "routeOfTomorrow": None
        }
    }  # fmt: skip
    log = (server.process.home / "master.log").read_text()
    assert "asks for `fieldOfTomorrow` of Query.viewer, which is not known here" in log
    assert "asks for `routeOfTomorrow` of Query, which is not known here" in log


@pytest.mark.long
def test_request_for_the_same_history_many_times_is_refused(server: WandbServer) -> None:
    server.begin("asked-often")
    rows = [{"_step": step, "loss": step} for step in range(2000)]
    assert server.log("asked-often", 0, *rows, complete=True, exitcode=0).status_code == 200
    history = "history(minStep: 0, maxStep: 2000)"
    query = 'query Q { project(name: "raw") { run(name: "asked-often") { %s } } }'
    found = server.ask(query % f"a: {history} b: {history}")
    assert len(found["data"]["project"]["run"]["b"]) == 2000

    found = server.ask(query % " ".join(f"a{number}: {history}" for number in range(1000)))

    assert found["data"] is None
    assert found["errors"][0]["message"].startswith("A request must ")


@pytest.mark.parametrize(
    ("link", "status", "found"),
    [
        ("paceline/linked/runs/here", 200, "experiment_id"),
        ("paceline/linked", 200, "label"),
        ("paceline/linked/runs/none", 404, None),
        ("paceline/none", 404, None),
        ("experiments/77/runs/none", 404, None),
        ("a/b/runs", 404, None),
        ("one", 404, None),
    ],
)
def test_address_that_the_client_prints_is_found(
    server: WandbServer, link: str, status: int, found: str | None
) -> None:
    server.begin("here", "linked")
    reply = server.http.get("/api/v1/runs", params={"link": link})
    assert reply.status_code == status, reply.text
    if found is not None:
        told = reply.json()
        assert [name for name, value in told.items() if value is not None] == [found]
        assert told["label"] in (None, "project:linked")


def test_report_token_logs_but_neither_lists_nor_reads_artifacts(server: WandbServer) -> None:
    token = server.process.client().create_token("reporter", scope="report").secret
    reporter = httpx2.Client(base_url=server.url, auth=("api", token))

    def ask(query: str, **variables: Any) -> httpx2.Response:
        return reporter.post("/graphql", json={"query": query, "variables": variables})

    assert ask(UPSERT, name="told", project="told").json()["data"]["upsertBucket"]["inserted"]
    assert ask(RUN, name="told", project="told").json()["data"]["project"]["run"]
    for fields in ("runs { edges { node { id } } }", 'artifact(name: "a:v0") { id }'):
        reply = ask(f'query {{ project(name: "told", entityName: "paceline") {{ {fields} }} }}')
        assert reply.status_code == 403
        assert "must have the scope 'read'" in reply.json()["errors"][0]["message"]
    reporter.close()


CREATE = """
mutation CreateArtifact($input: CreateArtifactInput!) {
  createArtifact(input: $input) { artifact { id state } }
}
"""
ADD_FILES = """
mutation CreateArtifactFiles($files: [CreateArtifactFileSpecInput!]!) {
  createArtifactFiles(input: {artifactFiles: $files}) { files { edges { node { uploadUrl } } } }
}
"""
ADD_MANIFEST = """
mutation CreateArtifactManifest($id: ID!) {
  createArtifactManifest(input: {artifactID: $id}) { artifactManifest { file { uploadUrl } } }
}
"""
COMMIT = "mutation C($id: ID!) { commitArtifact(input: {artifactID: $id}) { artifact { id } } }"


def begin_artifact(server: WandbServer, name: str, **contents: Any) -> str:
    """Begin a run and an artifact of one name, upload a manifest, and return the artifact's id."""
    server.begin(name, name)
    given = {"entityName": "paceline", "projectName": name, "runName": name, "digest": "d"}
    given |= {"artifactTypeName": "model", "artifactCollectionName": name}
    artifact = server.ask(CREATE, input=given)["data"]["createArtifact"]["artifact"]["id"]
    made = server.ask(ADD_MANIFEST, id=artifact)["data"]["createArtifactManifest"]
    url = made["artifactManifest"]["file"]["uploadUrl"]
    assert httpx2.put(url, json={"contents": contents}).status_code == 200
    return str(artifact)


def test_artifact_whose_upload_was_cut_cannot_be_committed(server: WandbServer) -> None:
    artifact = begin_artifact(server, "cut", **{"a.bin": {"digest": "x", "size": 10}})
    spec = {"artifactID": artifact, "name": "a.bin", "md5": "x"}
    edges = server.ask(ADD_FILES, files=[spec])["data"]["createArtifactFiles"]["files"]["edges"]

    def cut() -> Iterator[bytes]:
        yield b"01234"
        raise ConnectionError("cut")

    with pytest.raises(ConnectionError):
        httpx2.put(edges[0]["node"]["uploadUrl"], content=cut())
    refused = server.ask(COMMIT, id=artifact)
    assert httpx2.put(edges[0]["node"]["uploadUrl"], content=b"0123456789").status_code == 200
    committed = server.ask(COMMIT, id=artifact)

    assert "must be uploaded with 10 bytes" in refused["errors"][0]["message"]
    assert committed["data"]["commitArtifact"]["artifact"]["id"] == artifact


@pytest.mark.parametrize("name", ["../up.txt", "/etc/x", "a/../../b", "a\nb", "a\\b"])
def test_file_of_an_artifact_that_lies_elsewhere_is_refused(server: WandbServer, name: str) -> None:
    """Neither its content nor a manifest that names it is taken: clients would write it there."""
    artifact = begin_artifact(server, "elsewhere", **{name: {"digest": "x", "size": 1}})
    added = server.ask(ADD_FILES, files=[{"artifactID": artifact, "name": name, "md5": "x"}])
    committed = server.ask(COMMIT, id=artifact)

    for found in (added, committed):
        assert found["data"] is None
        assert "The path of a file must be relative" in found["errors"][0]["message"]


@pytest.mark.parametrize("name", ["media/html/page.html", "media/images/drawing.svg"])
def test_media_that_carry_scripts_cannot_act_on_the_masters_origin(
    server: WandbServer, name: str
) -> None:
    server.begin("scripts")
    create = """
    mutation CreateRunFiles($files: [String!]!) {
      createRunFiles(input: {entityName: "paceline", projectName: "raw", runName: "scripts",
                             files: $files}) { files { uploadUrl } }
    }
    """
    [made] = server.ask(create, files=[name])["data"]["createRunFiles"]["files"]
    assert httpx2.put(made["uploadUrl"], content=b"<script>").status_code == 200
    read = """
    query Files($names: [String!]) { project(name: "raw", entityName: "paceline") {
      run(name: "scripts") { files(names: $names) { edges { node { directUrl } } } } } }
    """
    files = server.ask(read, names=[name])["data"]["project"]["run"]["files"]
    reply = httpx2.get(files["edges"][0]["node"]["directUrl"])

    assert reply.content == b"<script>"
    assert reply.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["content-disposition"].startswith("attachment")


SWEEP = """
mutation UpsertSweep($id: ID, $config: String, $project: String, $state: String) {
  upsertSweep(input: {id: $id, config: $config, projectName: $project, state: $state}) {
    sweep { id name state runCount runCountExpected } configValidationWarnings
  }
}
"""
AGENT = """
mutation CreateAgent($project: String, $sweep: String!) {
  createAgent(input: {host: "here", projectName: $project, sweep: $sweep}) { agent { id } }
}
"""
BEAT = """
mutation Heartbeat($id: ID!, $running: JSONString) {
  agentHeartbeat(input: {id: $id, metrics: "{}", runState: $running}) { agent { id } commands }
}
"""
AGENT_SCRIPT = """
    import os, wandb
    from wandb.agents import pyagent
    pyagent.Agent.HEARTBEAT_SLEEP_SECONDS = 0.2
    number = 0
    def main():
        global number
        number += 1
        if number == int(os.environ["WAIT_AT"]):
            print("waits", flush=True)
            input()
        with wandb.init() as run:
            run.log({"score": run.config.x * run.config["net"]["n"]})
    found = wandb.sweep(
        {"name": "tried", "method": "grid", "metric": {"name": "score", "goal": "minimize"},
         "early_terminate": {"type": "hyperband", "min_iter": 1},
         "parameters": {"x": {"values": [0.5, 0.25]},
                        "net": {"parameters": {"n": {"min": 1, "max": 2}}}}},
        project=os.environ["PROJECT"])
    wandb.agent(found, function=main, project=os.environ["PROJECT"])
    sweep = wandb.Api().sweep(f"paceline/{os.environ['PROJECT']}/{found}")
    assert (sweep.name, sweep.state, sweep.expected_run_count) == ("tried", "FINISHED", 4)
    assert sweep.best_run().summary["score"] == 0.25
    runs = list(sweep.runs)
    assert {run.sweep_name for run in runs} == {found} and runs[0].sweep.id == found
    print(found, sorted((run.config["x"], run.config["net"]["n"], run.state) for run in runs))
"""
ALL_POINTS = str([(x, n, "finished") for x in (0.25, 0.5) for n in (1, 2)])


@pytest.mark.long
def test_agent_of_a_sweep_runs_each_point_and_its_runs_carry_them(
    server: WandbServer, start_script: Script
) -> None:
    """The agent ends by itself after the grid, and is told what of the config is not served."""
    process = start_script(server, AGENT_SCRIPT, PROJECT="swept", WAIT_AT="0", WANDB_SILENT="0")
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors

    name, _, found = output.splitlines()[-1].partition(" ")
    assert found == ALL_POINTS
    assert "`early_terminate` is not served here. Runs go on to their end." in errors
    reply = server.get(f"/experiments?label=sweep:{name}")
    runs = [one for one in reply["items"] if f"sweep:{name}" in one["labels"]]
    assert len(runs) == 4
    [trial] = server.get(f"/experiments/{runs[0]['id']}/trials")["items"]
    assert set(trial["hparams"]) == {"x", "net"}


@pytest.mark.long
def test_sweep_goes_on_through_a_killed_master_with_each_point_once(
    tmp_path: Path, master_server: Any, free_port: int, start_script: Script
) -> None:
    """A restarted master knows which points were given out."""
    process = MasterProcess(tmp_path / "home", 0, "--port", str(free_port), server=master_server)
    server = WandbServer(process)
    client = start_script(
        server, AGENT_SCRIPT, PROJECT="swept", WAIT_AT="3", WANDB_CONSOLE="off", WANDB_SILENT="0"
    )
    assert client.stdout is not None
    while (line := client.stdout.readline()) != "waits\n":
        assert line, client.communicate()[1]

    process.kill()
    server.http.close()
    server = WandbServer(process)
    output, errors = client.communicate("\n", timeout=600)
    server.http.close()
    process.close()

    assert client.returncode == 0, errors
    assert output.splitlines()[-1].partition(" ")[2] == ALL_POINTS


@pytest.mark.long
def test_wrong_config_of_a_sweep_is_shown_by_the_client(
    server: WandbServer, run_script: Callable[..., str]
) -> None:
    """The client raises the master's message."""
    script = """
        import wandb
        given = {"x": {"min": 1, "max": 0}}
        for method, parameters in (("bayes", {"x": {"value": 1}}), ("random", given)):
            try:
                wandb.sweep({"method": method, "parameters": parameters}, project="wrong")
            except wandb.errors.CommError as error:
                print(error)
    """
    output = run_script(server, script)

    assert "`method` must be one of grid, random, but got 'bayes'" in output
    assert "`parameters.x.min` must be less than `max` (0), but got 1" in output


def make_sweep(server: WandbServer, project: str, config: dict[str, Any]) -> dict[str, Any]:
    """Make a sweep, and return its fields."""
    told = server.ask(SWEEP, config=json.dumps(config), project=project)
    found: dict[str, Any] = told["data"]["upsertSweep"]["sweep"]
    return found


def make_agent(server: WandbServer, project: str, sweep: str) -> str:
    """Register an agent, and return its id."""
    told = server.ask(AGENT, project=project, sweep=sweep)
    return str(told["data"]["createAgent"]["agent"]["id"])


def beat(server: WandbServer, agent: str, *running: str) -> dict[str, Any] | None:
    """Send a heartbeat, and return the command of the answer, if there is one."""
    told = server.ask(BEAT, id=agent, running=json.dumps(dict.fromkeys(running, True)))
    [command] = json.loads(told["data"]["agentHeartbeat"]["commands"]) or [None]
    found: dict[str, Any] | None = command
    return found


def test_agents_at_once_never_get_the_same_point(server: WandbServer) -> None:
    """Each of 40 points goes to one of 4 agents that ask at the same time, then all shall end."""
    parameters = {"x": {"values": list(range(10))}, "y": {"min": 0, "max": 3}}
    sweep = make_sweep(server, "at-once", {"method": "grid", "parameters": parameters})
    agents = [make_agent(server, "at-once", sweep["name"]) for _ in range(4)]

    def work(agent: str) -> list[tuple[int, int]]:
        found = []
        while (command := beat(server, agent)) and command["type"] == "run":
            found.append((command["args"]["x"]["value"], command["args"]["y"]["value"]))
            assert beat(server, agent, command["run_id"]) is None
        assert command == {"type": "exit"}
        return found

    with ThreadPoolExecutor(4) as pool:
        points = [point for each in pool.map(work, agents) for point in each]
    assert sorted(points) == [(x, y) for x in range(10) for y in range(4)]


def test_point_whose_answer_was_lost_is_given_once_more(server: WandbServer) -> None:
    """An agent that asks again without having begun its run gets it again, but not for ever."""
    config = {"method": "random", "run_cap": 2, "parameters": {"x": {"min": 0.0, "max": 1.0}}}
    agent = make_agent(server, "lost", make_sweep(server, "lost", config)["name"])
    first, again, second, _, last = (beat(server, agent) for _ in range(5))
    assert first is not None
    assert second is not None
    assert first == again
    assert (second["type"], last) == ("run", {"type": "exit"})
    assert first["args"]["x"]["value"] != second["args"]["x"]["value"]


def test_state_of_a_sweep_tells_agents_to_wait_and_to_end(server: WandbServer) -> None:
    """A paused sweep gives no runs, a stopped one lets runs end, a canceled one ends them."""
    config = {"method": "random", "parameters": {"x": {"values": [1, 2]}}}
    sweep = make_sweep(server, "states", config)
    agent = make_agent(server, "states", sweep["name"])
    found = []
    for state in ("PAUSED", "FINISHED", "CANCELED"):
        server.ask(SWEEP, id=sweep["id"], state=state)
        found += [beat(server, agent), beat(server, agent, "r1")]
    exits = {"type": "exit"}
    assert found == [None, None, exits, None, exits, exits]
    server.ask(SWEEP, id=sweep["id"], state="RUNNING")
    given = beat(server, agent)
    other = config | {"parameters": {"x": {"values": [3]}}}
    refused = server.ask(SWEEP, id=sweep["id"], config=json.dumps(other))
    assert given is not None
    assert given["type"] == "run"
    assert "must stay once it has given out runs" in refused["errors"][0]["message"]


@pytest.mark.parametrize(
    ("query", "variables"),
    [
        (SWEEP, {"config": "a: [", "project": "odd"}),
        (SWEEP, {"config": "[1]", "project": "odd"}),
        (SWEEP, {"config": "", "project": "odd"}),
        (SWEEP, {"project": "odd"}),
        (SWEEP, {"config": "x: " + "y" * 70_000, "project": "odd"}),
        (SWEEP, {"config": "[" * 60_000, "project": "odd"}),
        (SWEEP, {"config": "a: &a [1,1,1,1]\nb: &b [*a,*a]\nb: *b", "project": "odd"}),
        (SWEEP, {"config": "method: grid\nparameters: {x: {values: [1]}}", "project": "a/b"}),
        (SWEEP, {"id": "U3dlZXA6djE6YTpiOmM=", "state": "RUNNING"}),
        (SWEEP, {"id": "no", "state": "RUNNING"}),
        (AGENT, {"project": "odd", "sweep": "none"}),
        (AGENT, {"project": "odd", "sweep": ""}),
    ],
)
def test_odd_requests_about_sweeps_get_an_error(
    server: WandbServer, query: str, variables: dict[str, Any]
) -> None:
    """Each is refused with a message, and changes nothing."""
    told = server.ask(query, **variables)
    assert told["data"] is None
    assert told["errors"][0]["message"]
    found = server.ask('query { project(name: "odd") { sweeps { edges { node { id } } } } }')
    assert (found["data"]["project"] or {"sweeps": {"edges": []}})["sweeps"]["edges"] == []


def test_grid_with_more_points_than_a_number_has_bits_is_shown(server: WandbServer) -> None:
    """Its count is cut, and its first point is given."""
    parameters = {f"x{number}": {"min": 0, "max": 10**9} for number in range(10)}
    sweep = make_sweep(server, "vast", {"method": "grid", "parameters": parameters})
    command = beat(server, make_agent(server, "vast", sweep["name"]))
    assert sweep["runCountExpected"] == 2**31 - 1
    assert command is not None
    assert command["args"]["x0"] == {"value": 0}


def test_agent_of_no_sweep_is_told_so_by_the_status(server: WandbServer) -> None:
    """The client ends after a 404 only."""
    body = {"query": BEAT, "variables": {"id": "QWdlbnQ6YTpiOmM6ZA==", "running": "{}"}}
    reply = server.http.post("/graphql", json=body)
    assert (reply.status_code, "no agent" in reply.text) == (404, True), reply.text
