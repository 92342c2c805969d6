"""Progress of passes, as a driver shows it."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.creators import PyTorchTrainer

X = torch.arange(64.0).reshape(64, 1) / 64


@pytest.mark.slow
def test_each_pass_is_shown_with_its_batches_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PACELINE_PROGRESS", raising=False)

    def fails(config: dict[str, bool], train_iterator: object) -> dict[str, float]:
        for number, _ in enumerate(train_iterator):  # type: ignore[arg-type, var-annotated]
            if config["fails"] and number == 2:
                raise ZeroDivisionError
        return {}

    for train_function, config in ((None, {}), (fails, {"fails": True})):
        with PyTorchTrainer(
            lambda config: nn.Linear(1, 1),
            lambda config: TensorDataset(X, X),
            lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
            nn.MSELoss,
            train_function=train_function,
            config=config,
            num_workers=2,
            batch_size=8,
            use_tqdm=True,
        ) as trainer:
            if train_function is None:
                trainer.train()
                shown = capsys.readouterr().err
                assert "batch 8 of 8  100%" in shown
                assert "completed in" in shown
                trainer.train(num_steps=3)
                assert "batch 3 of 3" in capsys.readouterr().err
            else:
                with pytest.raises(ZeroDivisionError):
                    trainer.train()
                shown = capsys.readouterr().err
                assert "batch 3 of 8" in shown
                assert "failed (ZeroDivisionError) after" in shown
    assert "paceline-progress" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_passes_the_end_and_the_saved_state_are_shown_without_tqdm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PACELINE_PROGRESS", raising=False)

    def run() -> None:
        with PyTorchTrainer(
            lambda config: nn.Linear(1, 1),
            lambda config: TensorDataset(X, X),
            lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
            nn.MSELoss,
            num_workers=2,
            batch_size=8,
        ) as trainer:
            trainer.train()
            trainer.save("state.pt")
            trainer.train()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    begin, first, *_, end, place, look, resume = capsys.readouterr().err.splitlines()
    assert " on 2 workers  run paceline_runs/" in begin
    assert first.startswith("batch 8  ")
    assert " train_loss=" in f" {first}"
    assert end.startswith("batch 16  ")
    assert "failed (ZeroDivisionError) after" in end
    assert place.startswith("run paceline_runs/")
    assert look.startswith("look: paceline runs show ")
    assert resume == "resume: load('state.pt') of a new trainer"
