"""The trainer of Transformers in train functions: reports, checkpoints, resume, preemption."""

import hashlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import integrations, train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(config: dict[str, Any]) -> tuple[str, int]:
    import torch
    import transformers
    from torch import nn

    warnings.filterwarnings("ignore")

    class Net(nn.Module):
        """Draws random numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x: Any, labels: Any) -> Any:
            time.sleep(config.get("delay_s", 0.0))
            out = self.net(x)
            return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

    class Kill(transformers.TrainerCallback):  # type: ignore[misc]
        """Ends one rank once."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            marker = Path(config.get("marker", "never"))
            is_hit = state.global_step == config.get("step") and not marker.exists()
            if is_hit and train.world_rank() == config["rank"]:
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    data = [{"x": row, "labels": row.sum(0, keepdim=True)} for row in x]
    arguments = transformers.TrainingArguments(
        output_dir=config.get("output", "out"),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        save_steps=config.get("every", 1000),
        save_strategy="steps",
        eval_strategy="epoch",
        logging_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    transformers.set_seed(3)
    trainer = transformers.Trainer(
        model=Net(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=[Kill()]
    )
    integrations.prepare_transformers(trainer).train()
    state = trainer.model.state_dict()
    weights = b"".join(each.detach().numpy().tobytes() for each in state.values())
    return hashlib.sha256(weights).hexdigest(), trainer.state.global_step


def test_any_checkpoint_goes_on_to_the_same_bits() -> None:
    trainer = train.Trainer(num_workers=0)
    straight = trainer.run(fit, {"every": 5})
    assert straight[0][1] == 36
    steps = [each.load()["step"] for each in straight.checkpoints]
    assert steps == [5, 10, 15, 20, 25, 30, 35, 36]
    assert any("eval_loss" in each for each in straight.metrics)
    # The trainer's own directories do not add up.
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-36"]
    for checkpoint in straight.checkpoints[::3]:
        again = trainer.run(fit, {"every": 5, "output": "again"}, checkpoint=checkpoint)
        assert again == straight


def test_a_run_of_three_whose_rank_was_killed_ends_in_the_same_bits() -> None:
    strategy = train.CheckpointStrategy(num_to_keep=2)
    with train.Trainer(num_workers=3) as trainer:
        straight = trainer.run(fit, {"every": 3, "output": "a"}, checkpoint_strategy=strategy)
        assert straight[0][1] == 12
        for rank in (0, 2):
            kill = {"rank": rank, "step": 5, "marker": f"killed-{rank}", "output": f"b{rank}"}
            results = trainer.run(fit, {"every": 3, **kill}, checkpoint_strategy=strategy)
            assert results.num_restarts == 1
            assert len(results.checkpoints) == 2
            assert results == straight


def test_a_signal_has_it_save_after_the_step_and_end(
    preempted_and_resumed: Callable[[str], str],
) -> None:
    out = preempted_and_resumed(__file__)
    with train.Trainer(num_workers=2) as straight:
        assert f"done {straight.run(fit, {'output': 'other'})[0]}" in out


def test_another_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a transformers.Trainer, but is a builtins.int"):
        integrations.prepare_transformers(3)
