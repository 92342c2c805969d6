"""A search method from a package of its own, from its installation to the end of its search."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
SCRIPT = """
import paceline as det

lr = det.get_cluster_info().trial.hparams["lr"]
with det.core.init() as context:
    for batch in range(1, 9):
        context.train.report_validation_metrics(batch, {"loss": lr})
        if context.preempt.should_preempt():
            break
"""
SEARCHER = {
    "name": "median_stopping", "metric": "loss", "max_trials": 6, "max_concurrent_trials": 2,
    "max_time": 8, "min_time": 2, "min_others": 2,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "entrypoint": "python3 train.py", "searcher": SEARCHER, "max_restarts": 0,
    "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1}},
    "reproducibility": {"experiment_seed": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example beside the environment, and return the directory."""
    root = tmp_path_factory.mktemp("plugins")
    source = root / "source"
    source.mkdir()
    # A build leaves files beside its source.
    for path in PLUGINS.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--target", str(root / "site"), str(source)]
    subprocess.run(command, check=True)
    return root / "site"


def test_a_search_method_is_added_by_installing_a_package(
    installed: Path,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = write_context(SCRIPT)
    master = make_master(2)

    def create(searcher: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Create an experiment by the command line, whose process knows of the package too."""
        (code / "config.json").write_text(json.dumps(CONFIG | {"searcher": searcher}))
        command = [sys.executable, "-m", "paceline.cli", "experiment", "create", "-f"]
        command += [str(code / "config.json"), str(code)]
        environment = os.environ | {"PACELINE_HOME": str(master.home)}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(installed))
        client = master.start().client()
        done = create(SEARCHER)
        assert done.returncode == 0, done.stderr
        experiment = client.get_experiment(1)
        assert not experiment.data.has_rungs
        trials = list(experiment.trials())
        trained = {trial.hparams["lr"]: trial.reload().steps_completed for trial in trials}
        assert len(trained) == 6
        # The best one is never worse than the median, and among six some are.
        assert trained[min(trained)] == 8
        stopped = [steps for steps in trained.values() if steps < 8]
        assert stopped
        assert min(stopped) >= 2
        # An error in a field of its own reads as in any other.
        done = create({**SEARCHER, "max_trails": 6})
        assert done.returncode != 0
        assert "`searcher.max_trails` is not a known field" in done.stderr
        assert "did you mean `max_trials`?" in done.stderr
        master.kill()
    # Without the package, what it has done stays visible.
    experiment = master.start().client().get_experiment(1)
    assert "search method" not in (master.home / "master.log").read_text()
    assert (experiment.data.searcher, experiment.state.value) == ("median_stopping", "COMPLETED")
    assert len(list(experiment.trials())) == 6
    done = create(SEARCHER)
    assert done.returncode != 0
    assert "`searcher.name` is not known" in done.stderr
    assert "`adaptive_asha`" in done.stderr


def test_a_search_waits_for_its_package(
    installed: Path,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master that starts without it says so, loses nothing, and goes on once it is back."""
    code = write_context(SCRIPT.replace("    for", "    open('begun', 'w')\n    for", 1))
    master = make_master(1)
    (code / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "paceline.cli", "experiment", "create"]
    command += [str(code / "config.json"), str(code)]
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(installed))
        master.start()
        environment = os.environ | {"PACELINE_HOME": str(master.home)}
        subprocess.run(command, env=environment, check=True)
        wait_until(lambda: list(master.home.glob("attempts/*/context/begun")))
        master.kill()
    told = "cannot go on, as its search method `median_stopping` is not installed"
    experiment = master.start().client().get_experiment(1)
    assert told in (master.home / "master.log").read_text()
    assert experiment.state.value in ("RUNNING", "QUEUED")
    master.kill()
    monkeypatch.setenv("PYTHONPATH", str(installed))
    experiment = master.start().client().get_experiment(1)
    assert experiment.wait().value == "COMPLETED", experiment.reload().data.error
    assert len(list(experiment.trials())) == 6
