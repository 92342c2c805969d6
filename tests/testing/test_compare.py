"""What counts as a difference between the ends of two runs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from paceline import core
from paceline._training.engine.checkpoints.state_format import save_state
from paceline.testing._compare_runs import RunFacts, compare_runs, find_run, read_run_facts

Write = Callable[[Path], Any]
MakeRun = Callable[..., RunFacts]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Return a function that makes a run with one checkpoint and some reports."""
    number = iter(range(9))

    def make(
        write: Write = lambda path: None,
        rows: dict[int, dict[str, Any]] | None = None,
        group: str = "training",
        **metadata: Any,
    ) -> RunFacts:
        directory = tmp_path / str(next(number))
        directory.mkdir()
        monkeypatch.chdir(directory)
        with core.init() as context:
            for step, metrics in (rows or {}).items():
                context.train.report_metrics(group, step, metrics)
            with context.checkpoint.store_path({"steps_completed": 1, **metadata}) as (path, _):
                write(path)
        run = find_run(directory)
        assert run is not None
        return read_run_facts(run)

    return make


def tensors(**values: Any) -> Write:
    return lambda path: save_file(values, path / "model.safetensors")


def as_json(value: Any) -> Write:
    return lambda path: (path / "state.json").write_text(json.dumps(value))


def torch_file(value: Any) -> Write:
    return lambda path: torch.save(value, path / "state.pt")


def text(value: str) -> Write:
    return lambda path: (path / "notes.txt").write_text(value)


ONE = torch.ones(4, 2)
NEXT = torch.nextafter(ONE, torch.tensor(2.0))
MIXED = torch.cat([ONE[:3], NEXT[3:]])
IN_BOTH = "in the straight run, {} in the resumed one"


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (
            tensors(a=NEXT, b=ONE),
            tensors(a=NEXT, b=MIXED),
            ["model.safetensors: b: 2 of 8 elements differ, by up to 1.19e-07"],
        ),
        (
            tensors(a=ONE.bfloat16()),
            tensors(a=ONE),
            [
                "model.safetensors: a: torch.bfloat16 of shape (4, 2) "
                + IN_BOTH.format("torch.float32 of shape (4, 2)")
            ],
        ),
        (
            tensors(a=torch.tensor([0.0, math.nan])),
            tensors(a=torch.tensor([-0.0, math.nan])),
            ["model.safetensors: a: 1 of 2 elements differ, by up to 0"],
        ),
        (
            tensors(a=torch.tensor([True, False])),
            tensors(a=torch.tensor([True, True])),
            ["model.safetensors: a: 1 of 2 elements differ"],
        ),
        (
            tensors(a=ONE),
            tensors(b=ONE),
            [
                "model.safetensors: a: only the straight run has it",
                "model.safetensors: b: only the resumed one has it",
            ],
        ),
        (
            as_json({"a": [1, {"b": 0.1}], "c": None}),
            as_json({"a": [1, {"b": 0.1 + 0.2 - 0.2}], "c": 1}),
            [
                "state.json: a[1].b: 0.1 " + IN_BOTH.format("0.10000000000000003"),
                "state.json: c: nothing " + IN_BOTH.format("1"),
            ],
        ),
        (
            as_json([0] * 600),
            as_json([0] * 590 + [1] * 10),
            ["state.json: 10 of 600 elements differ"],
        ),
        (as_json([1]), as_json([1, 2]), ["state.json: 1 elements " + IN_BOTH.format("2")]),
        (
            lambda path: save_state({"lr": (0.1, {3: "x"})}, path, "optimizer"),
            lambda path: save_state({"lr": (0.1, {3: "y"})}, path, "optimizer"),
            ["optimizer.json: lr[1].3: 'x' " + IN_BOTH.format("'y'")],
        ),
        (
            torch_file({"model": {"w": ONE}, "step": 1}),
            torch_file({"model": {"w": NEXT}, "step": 2}),
            [
                "state.pt: model.w: 8 of 8 elements differ, by up to 1.19e-07",
                "state.pt: step: 1 " + IN_BOTH.format("2"),
            ],
        ),
        (
            torch_file({"drawn": numpy.ones(2)}),
            torch_file({"drawn": numpy.zeros(2)}),
            ["state.pt: the bytes differ"],
        ),
        (text("ab"), text("ac"), ["notes.txt: the bytes differ"]),
        (text("ab"), text("abc"), ["notes.txt: 2 bytes " + IN_BOTH.format("3")]),
        (text("ab"), as_json({}), ["notes.txt: only the straight run has this file"]),
    ],
)
def test_differing_file_is_described(
    make_run: MakeRun, left: Write, right: Write, expected: list[str]
) -> None:
    found = [str(one) for one in compare_runs(make_run(left), make_run(right))]
    assert [one for one in found if not one.startswith("state.json: only")] == expected


@pytest.mark.parametrize(
    "write",
    [
        tensors(a=torch.tensor([1.0, math.nan, -0.0]), b=torch.empty(0)),
        as_json({"a": [1, None]}),
        torch_file({"drawn": ONE, "list": [1, 2.5, "x"]}),
        text("ab"),
    ],
)
def test_equal_files_do_not_differ(make_run: MakeRun, write: Write) -> None:
    assert compare_runs(make_run(write), make_run(write)) == []


def test_content_counts_and_not_how_it_is_laid_out(make_run: MakeRun) -> None:
    def indented(path: Path) -> None:
        (path / "state.json").write_text(json.dumps({"b": 2, "a": 1}, indent=2))

    assert compare_runs(make_run(as_json({"a": 1, "b": 2})), make_run(indented)) == []


def test_metadata_is_compared(make_run: MakeRun) -> None:
    [difference] = compare_runs(make_run(note="a"), make_run(note="b"))
    assert str(difference) == "metadata: note: 'a' " + IN_BOTH.format("'b'")


def test_metrics_are_compared_row_by_row(make_run: MakeRun) -> None:
    left = {1: {"loss": 0.5, "nan": math.nan}, 2: {"loss": 0.25}, 3: {"loss": 1.0}}
    right = {1: {"loss": 0.5, "nan": math.nan}, 2: {"loss": 0.26}}
    [difference] = compare_runs(make_run(rows=left), make_run(rows=right))
    assert str(difference) == (
        "metrics.training: loss: 2 of 3 rows differ, the first at step 2: 0.25 "
        + IN_BOTH.format("0.26")
    )
    [difference] = compare_runs(make_run(rows={1: {"x": 1}}, group="mine"), make_run())
    assert difference.place == "metrics.mine"


def test_timing_groups_are_not_compared(make_run: MakeRun) -> None:
    pair = [make_run(rows={1: {"seconds": seconds}}, group="profiling") for seconds in (1.0, 2.0)]
    assert compare_runs(*pair) == []
