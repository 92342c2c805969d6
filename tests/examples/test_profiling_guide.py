"""The guide to profiling names what is recorded."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from guides import Guide, line_trial

from paceline import core, pytorch
from paceline._base.journal_records import TimeShares
from paceline.cli._console_output import print_time_table
from paceline.config import validate_config
from paceline.journal import RunDirectory

GUIDE = Guide("docs/profiling.md")
# Other pages list these.
ELSEWHERE = {"samples_per_second", "batches_per_second", "data_wait_fraction", "num_recompiles"}


def test_each_part_of_a_step_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(line_trial(), names)
    with pytorch.init({"global_batch_size": 32, "lr": 0.1}) as context:
        trainer = pytorch.Trainer(names["LineTrial"](context), context)
        result = trainer.fit(max_length=pytorch.Epoch(2), profiling_enabled=True)
    table = GUIDE.text.partition("| Name | What it measures |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    rows = core.read_metrics(RunDirectory(result.run_dir), "profiling")
    assert {name for row in rows for name in row.metrics} - ELSEWHERE == listed


def test_the_table_of_shares_is_printed_so(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {field.name: 1.0 for field in dataclasses.fields(TimeShares)}
    print_time_table({**shares, "undivided_s": 0.0}, 8.0, 0.125)
    shown, printed = (
        re.sub(r"[\d.]+m? ?s?%?|─+|  +", " ", text).split()
        for text in (GUIDE.blocks("console")[0].partition("\n")[2], capsys.readouterr().out)
    )
    assert shown == printed


def test_every_share_is_listed() -> None:
    table = GUIDE.text.partition("| Share | REST field |")[2]
    listed = re.findall(r"^\| [\w ]+ \| `(\w+)`", table, re.MULTILINE)
    assert set(listed) == {field.name for field in dataclasses.fields(TimeShares)}


def test_the_section_of_the_config_is_valid() -> None:
    config = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}
    assert not validate_config({**config, **yaml.safe_load(GUIDE.blocks("yaml")[0])}).warnings
