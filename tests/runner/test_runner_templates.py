"""Runners and entrypoints of trials are forks of a template."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are templates on Linux only")

LOOK = """
import os, sys
print("fork" if "paceline._cluster.runner.attempt_run" in sys.modules else "fresh")
print("loaded" if "torch" in sys.modules else "not loaded")
print(sys.argv[1:], os.environ["MINE"], "SECRET" in open("/proc/self/environ").read())
kept = open("kept", "w")
kept.write("written")
"""


def looks(master: Any, script: str = LOOK, **changed: Any) -> list[str]:
    environment = {"variables": {"MINE": "mine"}} | changed.pop("environment", {})
    id_ = master.create(script, environment=environment, **changed)
    trial = master.wait_for_end(id_)
    assert trial["state"] == "COMPLETED", master.output(trial)
    return list(master.output(trial))


def test_trials_are_forks_with_torch_once_one_has_loaded_torch(
    master: Any, wait_until: Callable[..., None]
) -> None:
    master.start(OTHER="SECRET")
    told = looks(master, LOOK + "import torch", entrypoint="python3 train.py --a b")
    assert told == ["fork", "not loaded", "['--a', 'b'] mine True"]
    wait_until(lambda: looks(master)[1] == "loaded", 600)
    assert looks(master) == ["fork", "loaded", "[] mine True"]
    # Both are handed over by the master's template, which never sees variables of an experiment.
    for template in psutil.Process(master.pid).children(recursive=True):
        # Runners end meanwhile.
        with suppress(psutil.Error):
            if "template" in template.cmdline():
                assert "MINE" not in template.environ()


@pytest.mark.parametrize(
    ("changed", "environment"),
    [
        ({"entrypoint": "python3 -u train.py"}, {}),
        ({"entrypoint": "python3 train.py; true"}, {}),
        ({}, {"variables": {"MINE": "mine", "PACELINE_WARM": "0"}}),
        ({}, {"variables": {"MINE": "mine", "PYTHONHASHSEED": "3"}}),
        ({}, {"variables": {"MINE": "mine", "OMP_NUM_THREADS": "3"}}),
        ({}, {"python": sys._base_executable}),  # type: ignore[attr-defined] # as in `venv`
    ],
)
def test_entrypoints_that_differ_start_afresh(
    shared_master: Any, changed: dict[str, Any], environment: dict[str, Any]
) -> None:
    told = looks(shared_master, environment=environment, **changed)
    assert told[:2] == ["fresh", "not loaded"]
