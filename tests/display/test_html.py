"""Tables for notebooks."""

from pathlib import Path
from typing import Any

import pytest

from paceline import data, pytorch, train
from paceline._base.imports import html_table


def test_a_table_has_its_header_short_numbers_and_no_markup_of_its_cells() -> None:
    shown = html_table("a <b>", ("x", "y"), [(1, 0.123456789), ("<script>", "z" * 300)])
    assert "<b>a &lt;b&gt;</b>" in shown
    assert "<tr><th>x</th><th>y</th></tr>" in shown
    assert "<tr><td>1</td><td>0.123457</td></tr>" in shown
    assert "&lt;script&gt;" in shown
    assert "z" * 201 not in shown


def test_many_rows_are_left_out_in_the_middle() -> None:
    shown = html_table("t", (), [(number,) for number in range(100)])
    assert shown.count("<tr>") == 21
    assert "... 80 more ..." in shown
    assert "<td>99</td>" in shown
    assert "<table>" not in html_table("t", (), ())


def test_trainers_results_and_data_sets_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def fit() -> None:
        train.report(loss=0.25)
        train.report(loss=0.125, accuracy=0.5)
        train.save_checkpoint(epoch=1)

    trainer: Any = train.Trainer(num_workers=0)
    assert "Trainer without workers" in trainer._repr_html_()
    shown = trainer.run(fit)._repr_html_()
    assert "2 report(s) of rank 0" in shown
    assert "<th>report</th><th>loss</th><th>accuracy</th>" in shown
    assert "<td>2</td><td>0.125</td><td>0.5</td>" in shown
    assert str(trainer.run_dir) in shown
    several: Any = train.Trainer(num_workers=2, cluster="local")
    assert "<th>rank</th><th>node</th>" in several._repr_html_()
    samples: Any = data.Dataset([1, 2, 3])
    assert "<td>samples</td><td>3</td>" in samples._repr_html_()
    result: Any = pytorch.Result(
        metrics={"loss": 0.5},
        best_metrics={"loss": 0.25},
        checkpoints=["one"],
        stop_reason="length",
        steps_completed=3,
        run_dir=tmp_path,
        checkpoint_storage="s3://bucket",
    )
    assert "<td>loss</td><td>0.5</td><td>0.25</td>" in result._repr_html_()
    assert "s3://bucket/one" in result._repr_html_()
