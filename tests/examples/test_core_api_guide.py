"""The guide to the core API names what there is."""

import re
from pathlib import Path

from guides import Guide

from paceline import core
from paceline.core._profiler_context import SystemSampler

GUIDE = Guide("docs/core-api.md")


def test_the_calls_of_the_train_context_that_are_listed_exist() -> None:
    listed = set(re.findall(r"`train\.(\w+)\(", GUIDE.text))
    assert listed <= {*dir(core.TrainContext)}
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
