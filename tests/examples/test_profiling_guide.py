"""What the guide to profiling shows runs, and it names what is recorded."""

import dataclasses
import re
import warnings
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
HPARAMS = {"global_batch_size": 32, "lr": 0.1}
# Other pages list these.
ELSEWHERE = {"samples_per_second", "batches_per_second", "data_wait_fraction", "num_recompiles"}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the blocks use."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(line_trial(), names)
    return names


def test_each_part_of_a_step_is_recorded(
    names: dict[str, Any],
) -> None:
    with pytorch.init(HPARAMS) as context:
        names["trainer"] = pytorch.Trainer(names["LineTrial"](context), context)
        block = GUIDE.block("profiling_enabled=True")
        GUIDE.run([block.replace("trainer.fit", "result = trainer.fit")], names)
    reader = GUIDE.block("profiling_rank_2").replace("profiling_rank_2", "profiling")
    GUIDE.run([reader.replace("rank=2", "rank=0")], names)
    table = GUIDE.text.partition("| Name | What it measures |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    rows = core.read_metrics(RunDirectory(names["result"].run_dir), "profiling")
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


def test_a_loop_of_ones_own_says_that_it_validates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with core.init() as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
        names = {"context": context, "validate": len, "model": [1]}
        GUIDE.run([GUIDE.block("time_spent_on")], names)
    assert names["loss"] == 1


def test_the_section_of_the_config_is_valid() -> None:
    config = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}
    assert not validate_config({**config, **yaml.safe_load(GUIDE.blocks("yaml")[0])}).warnings


def test_traces_are_where_the_table_says(names: dict[str, Any]) -> None:
    names["Trial"] = names["LineTrial"]
    block = GUIDE.block("set_profiler").replace("pytorch.PyTorchTrial", "Trial")
    GUIDE.run([block.replace("        ...", "        super().__init__(context)")], names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA is not available|Warning: Profiler clears")
        with pytorch.init(HPARAMS) as context:
            trainer = pytorch.Trainer(names["LineTrial"](context), context)
            result = trainer.fit(max_length=pytorch.Batch(110))
    assert "`RUN_DIR/tensorboard/batch_105.pt.trace.json`" in GUIDE.text
    assert (result.run_dir / "tensorboard" / "batch_105.pt.trace.json").exists()
