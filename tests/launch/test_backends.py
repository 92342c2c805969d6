"""Launchers of back ends, as far as they go without the libraries; see tests/backends."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline._training.workers.processes.rank_environment import NodeLayout, horovod_variables
from paceline.launch import deepspeed, horovod


@pytest.mark.parametrize("launcher", [deepspeed, horovod])
def test_a_launcher_without_its_library_says_how_to_install_it(
    launcher: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = launcher.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    script = tmp_path / "train.py"
    script.touch()
    assert launcher.main([str(script)]) == 2  # type: ignore[attr-defined]
    error = capsys.readouterr().err
    assert f"paceline.launch.{name}: error: `paceline.launch.{name}` needs the package" in error
    assert "docs/backends.md" in error


@pytest.mark.parametrize("launcher", [deepspeed, horovod])
def test_the_help_has_the_name_of_the_launcher(
    launcher: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launcher.main(["--help"]) == 0  # type: ignore[attr-defined]
    name = launcher.__name__  # type: ignore[attr-defined]
    assert capsys.readouterr().out.startswith(f"usage: python3 -m {name} [OPTIONS --] PROGRAM")


def test_workers_get_the_place_that_each_library_reads() -> None:
    layout = NodeLayout(num_local_workers=2, master_port=1, num_nodes=3, node_rank=1)
    first, second = deepspeed._deepspeed_variables(layout)
    assert first == second == {"LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "3"}
    first, second = horovod_variables(2, 7)
    assert (first["HOROVOD_RANK"], second["HOROVOD_RANK"]) == ("0", "1")
    assert second["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "7"


def test_buffers_that_deepspeeds_workers_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(deepspeed, "check_installed", lambda *_: None)
    kept = tmp_path / f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_77_0"
    names = [f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_7_{rank}" for rank in range(2)]
    layout = NodeLayout(num_local_workers=2, master_port=7)
    kept.touch()
    options: Any = None
    with deepspeed.DeepSpeedBackend("deepspeed").open(options) as variables:
        for _ in range(2):
            assert len(variables(layout)) == 2
            # The next group begins without what the one before has left.
            assert [*tmp_path.iterdir()] == [kept]
            for name in names:
                (tmp_path / name).touch()
    assert [*tmp_path.iterdir()] == [kept]
