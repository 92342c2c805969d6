"""What the guide to the core API shows runs, and it names what there is."""

import re
import time
from pathlib import Path

import psutil
import pytest
from guides import Guide

from paceline import core
from paceline.core._profiler_context import SystemSampler

GUIDE = Guide("docs/core-api.md")


def test_the_code_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # No master is there to report to.
    monkeypatch.setenv("PACELINE_REPORT_PATIENCE_S", "0")
    GUIDE.run(GUIDE.blocks("python"), {"__name__": "guide"})
    deadline = time.monotonic() + 60
    while _processes_about(tmp_path):
        assert time.monotonic() < deadline, _processes_about(tmp_path)
        time.sleep(0.05)


def _processes_about(path: Path) -> list[list[str]]:
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in found if str(path) in " ".join(command)]


def test_the_calls_of_the_train_context_that_are_listed_exist() -> None:
    listed = set(re.findall(r"`train\.(\w+)\(", GUIDE.text))
    assert listed <= vars(core.TrainContext).keys()
    assert len(listed) >= 11


def test_every_system_metric_is_listed(tmp_path: Path) -> None:
    sampler = SystemSampler(tmp_path)
    sampler.open()
    sampler.take()
    names = sampler.take().keys()
    sampler.close()
    assert [
        name for name in names if f"`{name.replace('gpu_1_', 'gpu_0_')}`" not in GUIDE.text
    ] == []
