"""What the guide to sharded models shows runs, on two ranks."""

import textwrap
from pathlib import Path
from typing import Any

import torch
from guides import Guide

GUIDE = Guide("docs/sharding.md")
MODEL = """
import torch
from torch import nn
from paceline import pytorch, train

class MyLayer(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

class MyTransformer(nn.Sequential):
    def __init__(self):
        super().__init__(MyLayer(), MyLayer())

init_weights = None
"""
REST_OF_TRIAL = """
class Rest(pytorch.PyTorchTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"loss": self.model(batch).square().mean()}

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.ones(128, 8), self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.ones(32, 8), 32)
"""
OPTIONS = [
    "policy = MixedPrecisionPolicy(",
    "gradient_checkpointing=True",
    'with torch.device("meta")',
]


def run(code: str, torch_ranks: Any, environment: dict[str, str], directory: Path) -> None:
    """Run a script on two ranks."""
    (directory / "train.py").write_text(f"{MODEL}\n{code}")
    done = torch_ranks.run(2, "train.py", directory=directory, environment=environment)
    assert done.returncode == 0, done.stdout


def test_a_trial_is_sharded(torch_ranks: Any, environment: dict[str, str], tmp_path: Path) -> None:
    trial = GUIDE.blocks("python")[0]
    assert "(pytorch.PyTorchTrial)" in trial
    trial = trial.replace("(pytorch.PyTorchTrial)", "(Rest)")
    run(f"{REST_OF_TRIAL}\n{trial}", torch_ranks, environment, tmp_path)
    [checkpoint] = tmp_path.glob("paceline_runs/*/checkpoints/*")
    assert (checkpoint / "shard_1.json").exists()

    names: dict[str, Any] = {"checkpoint": checkpoint}
    exec(MODEL, names)
    model = names["model"] = names["MyTransformer"]()
    before = model[0].weight.detach().clone()
    GUIDE.run([GUIDE.block("shard_*.safetensors")], names)
    assert names["weights"].keys() == model.state_dict().keys()
    assert not torch.equal(model[0].weight, before)


def test_options_of_wrap_model(
    torch_ranks: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    blocks = [GUIDE.block(text) + "model(torch.ones(2, 8))\n" for text in OPTIONS]
    # torch's default back end compiles for a minute.
    code = "\n".join(blocks).replace('{"dynamic"', '{"backend": "aot_eager", "dynamic"')
    run(
        'with pytorch.init({"global_batch_size": 8}, data_parallel="fsdp") as context:\n'
        + textwrap.indent(code, "    "),
        torch_ranks, environment, tmp_path,
    )  # fmt: skip


def test_a_train_function_is_sharded(
    torch_ranks: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    step = "model(torch.ones(2, 8)).sum().backward()\n    optimizer.step()"
    code = GUIDE.block("def sharded_func").replace("...\n", f"{step}\n")
    code += "weights, _ = train.Trainer().run(sharded_func)\nassert len(weights) == 4\n"
    run(code, torch_ranks, environment, tmp_path)


def test_config_objects_are_sharded(
    torch_ranks: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    fields = """
        model_class=MyTransformer, model_params=ModelParameters.of({}), pred_names=["y"],
        dataset=torch.utils.data.TensorDataset(torch.ones(64, 8), torch.ones(64, 8)),
        loss_function=nn.MSELoss(), num_epochs=2, model_save_dir="results",
    """
    code = "from paceline.declarative import *\nconfigs = " + GUIDE.block("TrainingConfig(")
    code = code.replace("    ...,\n", fields)
    code += "trainer = Trainer(configs)\ntrainer.build()\ntrainer.run_training()\n"
    run(code, torch_ranks, environment, tmp_path)
    assert (tmp_path / "results" / "best_model.pth").exists()


def test_creators_are_sharded(run_with_torch: Any) -> None:
    code = """
from paceline.creators import PyTorchTrainer

def model_creator(config):
    return MyTransformer()

def data_creator(config):
    return [(torch.ones(4, 8), torch.ones(4, 8))]

def optimizer_creator(model, config):
    return torch.optim.SGD(model.parameters(), lr=0.1)

"""
    block = GUIDE.block("PyTorchTrainer(").replace("num_workers=4", "num_workers=1")
    end = 'assert trainer.train()["batch_count"] == 1\ntrainer.shutdown()\n'
    done = run_with_torch(f"{MODEL}{code}{block}{end}")
    assert done.returncode == 0, done.stderr
