"""Search methods of other packages whose code fails, or whose package is missing for a while."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

MODULE = """
import dataclasses
from typing import Any, ClassVar, Literal

from paceline.config import Searcher
from paceline.search import SearchConfig, SearchMethod, Stop, Train
from pydantic import Field

class Faulty(Searcher):
    wants_reports = True
    name: Literal["faulty"] = Field(default="faulty", description="Search method.")
    fault: str = Field(default="", description="The part that fails.")

    def search_config(self):
        fail(self.fault, "search_config")
        kind = Nameless if self.fault == "kind" else FaultyConfig
        return kind(metric=self.metric, fault=self.fault)

class Bare(Searcher):
    name: Literal["bare"] = Field(default="bare", description="Search method.")

class Untyped(Searcher):
    name: str = Field(default="untyped", description="Search method.")

def fail(fault, part):
    if fault == part:
        raise KeyError(f"no key in {part}")

@dataclasses.dataclass(frozen=True, kw_only=True)
class Nameless(SearchConfig):
    fault: str

    def make_method(self, maker):
        fail(self.fault, "make_method")
        return SearchMethod() if self.fault == "abstract" else Method(maker, self.fault)

    def num_planned(self, space):
        fail(self.fault, "num_planned")
        return 2

class FaultyConfig(Nameless):
    kind: ClassVar[str] = "faulty"

class Method(SearchMethod):
    def __init__(self, maker, fault):
        self.maker, self.fault, self.reports = maker, fault, []

    def start(self):
        fail(self.fault, "start")
        if self.fault == "no trial":
            return []
        creates = [self.maker.sampled() for _ in range(2)]
        length = 2.5 if self.fault == "half a step" else 4
        return [op for c in creates for op in (c, Train(request_id=c.request_id, length=length))]

    def reported(self, request_id, time, metric):
        fail(self.fault, "reported")
        self.reports.append([request_id, time])
        if self.fault == "unknown trial":
            return [Stop(request_id="nobody")]
        if self.fault == "None":
            return None
        return [Stop(request_id=request_id)] if time >= 3 else []

    def exited(self, request_id, reason, is_stopped):
        fail(self.fault, "exited")
        return []

    def num_trials(self, num_invalid):
        if self.reports:
            fail(self.fault, "num_trials")
        return 2

    def snapshot(self):
        fail(self.fault, "snapshot")
        if self.fault == "set":
            return {"reports": set()}
        if self.fault == "integer keys" and not self.reports:
            return {"reports": {1: 2}}
        return {"reports": self.reports}

    def load(self, snapshot):
        fail(self.fault, "load")
        self.reports = snapshot["reports"]
"""
POINTS = """[paceline.search_methods]
faulty = faulty_methods:Faulty
bare = faulty_methods:Bare
untyped = faulty_methods:Untyped
"""
SCRIPT = """
import os, time
import paceline as det

with det.core.init() as context:
    for batch in range(1, 5):
        context.train.report_validation_metrics(batch, {"loss": 1 / batch})
        while batch == 2 and not os.path.exists(os.environ["GO_ON"]):
            time.sleep(0.05)
        if context.preempt.should_preempt():
            break
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a directory that has the methods installed."""
    root = tmp_path / "site"
    facts = root / "faulty_methods-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-methods\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(POINTS)
    (root / "faulty_methods.py").write_text(MODULE)
    return root


def config_of(fault: str, go_on: Path, name: str = "faulty") -> dict[str, Any]:
    more = {"fault": fault} if name == "faulty" else {}
    return {
        "entrypoint": "python3 train.py", "max_restarts": 0,
        "searcher": {"name": name, "metric": "loss", **more},
        "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1}},
        "environment": {"environment_variables": [f"GO_ON={go_on}"]},
    }  # fmt: skip


@pytest.fixture
def paceline(
    site: Path,
    tmp_path: Path,
    command_server: Any,
    fork_server_class: Any,
    write_context: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Any]]:
    """Return a function that runs a command about a config, where the methods are installed."""
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    code = write_context(SCRIPT)
    equipped = fork_server_class("paceline.cli._app", "paceline.client", "paceline.config")

    def run(*command: str, config: dict[str, Any] | None = None) -> Any:
        arguments = list(command)
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
            arguments.append(str(tmp_path / "config.json"))
            if "create" in command:
                arguments.append(str(code))
        server = equipped if str(site) in os.environ.get("PYTHONPATH", "") else command_server
        return server.run_to_end(
            "-m", "paceline.cli", *arguments,
            directory=Path.cwd(), environment=dict(os.environ),
        )  # fmt: skip

    yield run
    equipped.close()


AT_CREATION = {
    "search_config": "`faulty` failed in `search_config`: KeyError: 'no key in search_config'",
    "kind": "`Nameless.kind` must be the name of the search method",
    "make_method": "`faulty` failed in `make_method`: KeyError: 'no key in make_method'",
    "abstract": "`faulty` failed in `make_method`: TypeError: Can't instantiate abstract class",
    "start": "`faulty` failed in `start`: KeyError: 'no key in start' (faulty_methods.py, line",
    "no trial": "`faulty` failed in `start`: ValueError: it must create at least one trial",
    "half a step": "must be an integer of at least 1",
    "snapshot": "`faulty` failed in `snapshot`: KeyError",
    "set": "`faulty` failed in `snapshot`: ValueError: `snapshot()['reports']` must be JSON, but",
    "integer keys": "`faulty` must have the same state after `load`",
    "load": "`faulty` failed in `load`: KeyError: 'no key in load'",
}
LATER = {
    "reported": "`faulty` failed in `reported`: KeyError: 'no key in reported'",
    "unknown trial": "`faulty` failed in `reported`: ValueError: Stop(request_id='nobody') must be",
    "None": "`faulty` failed in `reported`: TypeError: 'NoneType' object is not iterable",
    "exited": "`faulty` failed in `exited`: KeyError: 'no key in exited'",
    "num_trials": "`faulty` failed in `num_trials`: KeyError: 'no key in num_trials'",
}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_method_that_fails_fails_its_experiment_and_loses_no_metric(
    make_master: Callable[..., Any],
    paceline: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = tmp_path / "go_on"
    go_on.touch()
    master = make_master(2)
    monkeypatch.setenv("PACELINE_HOME", str(master.home))
    client = master.start().client()
    address = json.loads((master.home / "master.json").read_text())["url"]
    headers = {"Authorization": f"Bearer {(master.home / 'token').read_text().strip()}"}

    def create(fault: str) -> httpx2.Response:
        """Create an experiment as the command line does, in a fraction of the time."""
        config = config_of(fault, go_on)
        config["environment"]["working_dir"] = str(tmp_path / "context")
        body = {"config": config}
        return httpx2.post(f"{address}/api/v1/experiments", json=body, headers=headers, timeout=60)

    for fault, told in AT_CREATION.items():
        answer = create(fault)
        assert answer.status_code == 422, (fault, answer.text)
        assert answer.json()["code"] == "search_method_failed", fault
        assert told in answer.json()["detail"], (fault, answer.text)
    done = paceline("e", "create", config=config_of("start", go_on))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert AT_CREATION["start"] in done.stderr
    assert list(client.list_experiments()) == []
    for fault, told in LATER.items():
        assert create(fault).status_code == 201, fault
        experiment = max(client.list_experiments(), key=lambda one: one.id)
        assert experiment.wait().value == "ERROR", fault
        assert told in (experiment.reload().data.error or "")
        trials = list(experiment.trials())
        assert len(trials) == 2
        # What was reported is stored, and nothing was lost on the way.
        assert sum(len(list(trial.iter_metrics("validation"))) for trial in trials) >= 1, fault
        assert experiment.data.num_records_lost == 0
        assert all(trial.data.state.is_terminal for trial in trials), fault
    done = paceline("e", "describe", "1")
    assert LATER["reported"] in " ".join(done.stdout.split())
    # The log says where it happened; an error that comes again within a minute has no traceback.
    assert 1 <= master.log().count('raise KeyError(f"no key in {part}")') <= 3


@pytest.mark.long
def test_a_preview_notices_what_fails(paceline: Callable[..., Any], tmp_path: Path) -> None:
    for fault in ("search_config", "kind", "make_method", "abstract", "num_planned"):
        done = paceline("preview-search", config=config_of(fault, tmp_path))
        told = AT_CREATION.get(fault, "`faulty` failed in `num_planned`")
        assert (done.returncode, "Traceback" in done.stderr) == (1, False), fault
        assert told in done.stderr, fault
    done = paceline("preview-search", config=config_of("", tmp_path, name="bare"))
    assert "Bare must have a method `search_config`" in " ".join(done.stderr.split())
    # A section of another package that is wrong costs the others nothing.
    done = paceline("preview-search", config=config_of("", tmp_path))
    assert done.returncode == 0, done.stderr
    done = paceline("preview-search", config=config_of("", tmp_path, name="untyped"))
    assert "its field `name` must have the type `Literal['untyped']`" in done.stderr
    assert "`searcher.name` is not known" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "way", ["uninstalled", pytest.param("takes other fields", marks=pytest.mark.slow)]
)
def test_a_search_decides_later_on_what_came_while_its_method_was_missing(
    way: str,
    make_master: Callable[..., Any],
    paceline: Callable[..., Any],
    site: Path,
    tmp_path: Path,
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = tmp_path / "go_on"
    master = make_master(1)
    monkeypatch.setenv("PACELINE_HOME", str(master.home))
    client = master.start().client()
    assert paceline("e", "create", config=config_of("", go_on)).returncode == 0

    def steps() -> list[int]:
        trials = client.get_experiment(1).trials()
        return [trial.reload().steps_completed for trial in trials]

    wait_until(lambda: steps() == [2, 0])
    master.kill()
    if way == "uninstalled":
        own = os.environ["PYTHONPATH"].removeprefix(str(site)).removeprefix(os.pathsep)
        monkeypatch.setenv("PYTHONPATH", own)
    else:
        fields = MODULE.replace("    fault: str", "    waves: int\n    fault: str", 1)
        (site / "faulty_methods.py").write_text(fields)
    client = master.start().client()
    other = {
        **config_of("", go_on), "hyperparameters": {},
        "searcher": {"name": "single", "metric": "loss"},
    }  # fmt: skip
    done = paceline("e", "create", config=other)
    assert done.returncode == 0, done.stderr
    go_on.touch()
    # The first trial ends, as nobody stops it; the second one waits, and leaves its slot to others.
    assert client.get_experiment(2).wait().value == "COMPLETED"
    waiting = client.get_experiment(1)
    assert steps() == [4, 0]
    assert (waiting.state.value, waiting.data.num_records_lost) == ("QUEUED", 0)
    assert any("`faulty` is not installed on the master" in text for text in waiting.data.warnings)
    done = paceline("e", "describe", "1", "--show-config")
    assert done.returncode == 0, done.stderr
    assert "It waits, as its search method `faulty` is not installed" in done.stdout
    assert paceline("e", "list").returncode == 0
    log = (master.home / "master.log").read_text()
    assert "Traceback" not in log
    assert log.count("`faulty`") <= 2
    master.kill()
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    (site / "faulty_methods.py").write_text(MODULE)
    client = master.start().client()
    experiment = client.get_experiment(1)
    assert experiment.wait().value == "COMPLETED", experiment.reload().data.error
    # The first one had ended before anybody told it to; the second one was stopped in time.
    assert steps() == [4, 3]
    assert [trial.state.value for trial in experiment.trials()] == ["COMPLETED", "STOPPED"]
    assert experiment.data.warnings == []
