"""Every snippet of the fourth source document runs: a guide to a trainer of creator functions.

The guide's snippets are typed anew, with its calls and argument names. They needed these
corrections and no others:

1. The trainer is imported: `from paceline.creators import PyTorchTrainer`.
2. What is missing is filled in: nets, data, losses, `train`, `inception_score` and
   `latent_vector_size`, and what the guide includes from files that it does not show.
3. Numbers of replicas and GPUs are those of a small machine: 2 in place of 100 or 4, and
   `use_gpu="auto"`.
4. The trainer with a hook lacks a comma behind `config={"lr": 0.001}`.
5. The keys of `apex_args` need quotes.
6. The train function of the last snippet is given `model`, `train_iterator` and `optimizer`, but
   uses `models`, `dataloader` and `optimizers`; it is given those.
7. `real_label` and `fake_label` are 1.0 and 0.0, as torch makes integers of 1 and 0.
8. `ray.init` is left out where there is no Ray cluster: workers are processes of this machine then.

9. The included example of Ray Tune has its creators without `tune.function(...)`, which Tune has no
   more. The hyperparameters are in `config`, `val_loss` is what was `validation_loss`, and the loss
   falls with 2 trials as it does with 12.
"""

import inspect
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from paceline.creators import PyTorchTrainer

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
num_replicas = 2
# The guide's own, 2 processes for each loader, would only take time.
QUICK: dict[str, Any] = {"dataloader_config": {"num_workers": 0}}


def model_creator(config: dict[str, Any]) -> nn.Module:
    return nn.Linear(1, 1)


def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-2))


def data_creator(config: dict[str, Any]) -> Any:
    return TensorDataset(X, 2 * X + 5), TensorDataset(X[:16], 2 * X[:16] + 5)


def scheduler_creator(optimizer: optim.Optimizer, config: dict[str, Any]) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)


def test_arguments_have_the_names_and_the_order_of_the_original() -> None:
    parameters = inspect.signature(PyTorchTrainer).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == [
        *("model_creator", "data_creator", "optimizer_creator", "loss_creator"),
        *("scheduler_creator", "train_function", "validation_function", "initialization_hook"),
        *("config", "dataloader_config", "num_replicas", "use_gpu", "batch_size", "backend"),
        *("use_fp16", "apex_args", "scheduler_step_freq", "cluster"),
    ]
    names = list(inspect.signature(PyTorchTrainer.train).parameters)
    assert names[1:4] == ["num_steps", "max_retries", "checkpoint"]


# ---- Setting up training, Training APIs, Shutting down, Exporting a model ------------------------


@pytest.mark.long
def test_setting_up_training() -> None:
    trainer = PyTorchTrainer(
        model_creator,
        data_creator,
        optimizer_creator,
        loss_creator=nn.MSELoss,
        scheduler_creator=scheduler_creator,
        config={"lr": 0.1},
        num_replicas=2,
        use_gpu="auto",
    )
    # One pass, over both data sets, with loaders as the trainer makes them by default.
    assert trainer.train()["num_samples"] == 64
    assert trainer.validate()["num_samples"] == 16
    model = trainer.get_model()
    trainer.shutdown()
    assert isinstance(model, nn.Linear)


# ---- Initialization functions, Fault tolerance, Save and load ------------------------------------


def initialization_hook(runner: Any) -> None:
    print("NCCL DEBUG SET")
    # Need this for avoiding a connection restart issue
    os.environ["NCCL_SOCKET_IFNAME"] = "^docker0,lo"
    os.environ["NCCL_LL_THRESHOLD"] = "0"
    os.environ["NCCL_DEBUG"] = "INFO"


def test_initialization_fault_tolerance_and_checkpoints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer_1 = PyTorchTrainer(
        model_creator,
        data_creator,
        optimizer_creator,
        loss_creator=nn.MSELoss,
        initialization_hook=initialization_hook,
        config={"lr": 0.001},
        num_replicas=2,
        use_gpu="auto",
        **QUICK,
    )
    assert trainer_1.apply_all_workers(lambda: os.environ["NCCL_DEBUG"]) == ["INFO", "INFO"]
    trainer_1.train(max_retries=1)
    trainer_1.train(max_retries=1, checkpoint="auto")

    checkpoint_path = os.path.join(tempfile.mkdtemp(), "checkpoint")
    trainer_1.save(checkpoint_path)
    trained = trainer_1.get_model()
    trainer_1.shutdown()

    trainer_2 = PyTorchTrainer(
        model_creator,
        data_creator,
        optimizer_creator,
        loss_creator=nn.MSELoss,
        num_replicas=num_replicas,
        **QUICK,
    )
    trainer_2.restore(checkpoint_path)
    assert torch.equal(trainer_2.get_model().weight, trained.weight)
    trainer_2.shutdown()
    assert capsys.readouterr().out.count("NCCL DEBUG SET") == 2


# ---- Mixed precision -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("apex_args", [None, {"opt_level": "O3", "num_losses": 2, "verbosity": 0}])
def test_mixed_precision(apex_args: Any, caplog: pytest.LogCaptureFixture) -> None:
    given = {} if apex_args is None else {"apex_args": apex_args}
    with caplog.at_level(logging.WARNING):
        trainer = PyTorchTrainer(
            model_creator,
            data_creator,
            optimizer_creator,
            loss_creator=nn.MSELoss,
            num_replicas=2,
            use_fp16=True,
            **given,
            **QUICK,
        )
    losses = [trainer.train()["train_loss"] for _ in range(3)]
    trainer.shutdown()
    assert losses[2] < losses[0]
    # The level and the number of losses have no counterpart.
    assert len(caplog.records) == (0 if apex_args is None else 2)


# ---- Multi-node, see tests/creators/test_ray.py; Hyperparameter tuning ---------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hyperparameter_tuning(
    ray_tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.creators import PyTorchTrainable

    tune = ray_tune
    monkeypatch.chdir(tmp_path)
    config = {
        "model_creator": model_creator,
        "data_creator": data_creator,
        "optimizer_creator": optimizer_creator,
        "loss_creator": nn.MSELoss,
        "num_replicas": num_replicas,
        "use_gpu": "auto",
        "batch_size": 16,
        "backend": "gloo",
        "config": {"lr": tune.grid_search([0.01, 0.1])},
        **QUICK,
    }
    analysis = tune.run(
        PyTorchTrainable,
        num_samples=1,
        config=config,
        stop={"training_iteration": 2},
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        storage_path=str(tmp_path / "tuned"),
        verbose=0,
    )
    best = analysis.get_best_config(metric="val_loss", mode="min")
    assert best["config"] == {"lr": 0.1}
    for trial in analysis.trials:
        assert trial.last_result["training_iteration"] == trial.last_result["epoch"] == 2
        with trial.checkpoint.as_directory() as path:
            assert torch.load(Path(path) / "trainer.pt", weights_only=True)["epoch"] == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainable_with_fixed_creators(
    ray_tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = ray_tune
    monkeypatch.chdir(tmp_path)
    trainable = PyTorchTrainer.as_trainable(
        model_creator,
        data_creator,
        optimizer_creator,
        loss_creator=nn.MSELoss,
        num_replicas=num_replicas,
        config={"lr": 0.0},
        override_tune_step=lambda trainer, info: {**trainer.train(), "at": info["iteration"]},
        **QUICK,
    )
    analysis = tune.run(
        trainable,
        config={"lr": 0.1},
        stop={"training_iteration": 2},
        storage_path=str(tmp_path / "tuned"),
        verbose=0,
    )
    last = analysis.trials[0].last_result
    assert last["at"] == 1
    assert last["train_loss"] < 26.0


# ---- Simultaneous multi-model training -----------------------------------------------------------

latent_vector_size = 4


class Discriminator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1), nn.Sigmoid())


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(latent_vector_size, 1))


def weights_init(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.5)


def inception_score(images: torch.Tensor) -> tuple[float, float]:
    return images.mean().item(), images.std().item()


def several_models_creator(config: dict[str, Any]) -> Any:
    netD = Discriminator()
    netD.apply(weights_init)

    netG = Generator()
    netG.apply(weights_init)
    return netD, netG


def several_optimizers_creator(models: Any, config: dict[str, Any]) -> Any:
    net_d, net_g = models
    discriminator_opt = optim.Adam(
        net_d.parameters(), lr=config.get("lr", 0.01), betas=(0.5, 0.999)
    )
    generator_opt = optim.Adam(net_g.parameters(), lr=config.get("lr", 0.01), betas=(0.5, 0.999))
    return discriminator_opt, generator_opt


def train_one(model: Any, dataloader: Any, criterion: Any, optimizer: Any, config: Any) -> float:
    loss = torch.zeros(())
    width = latent_vector_size if isinstance(model, Generator) else 1
    for x, _ in dataloader:
        optimizer.zero_grad()
        output = model(x.expand(-1, width)).sigmoid()
        loss = criterion(output, torch.ones_like(output))
        loss.backward()
        optimizer.step()
    return loss.item()


def custom_train(
    models: Any, dataloader: Any, criterion: Any, optimizers: Any, config: Any
) -> dict[str, Any]:
    result = {}
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        result[f"model_{i}"] = train_one(model, dataloader, criterion, optimizer, config)
    return result


def test_simultaneous_multi_model_training() -> None:
    trainer = PyTorchTrainer(
        several_models_creator,
        data_creator,
        several_optimizers_creator,
        loss_creator=nn.BCELoss,
        train_function=custom_train,
        **QUICK,
    )
    results = [trainer.train() for _ in range(3)]
    models = trainer.get_model()
    trainer.shutdown()
    assert results[2]["model_0"] < results[0]["model_0"]
    assert results[2]["model_1"] < results[0]["model_1"]
    assert [type(model) for model in models] == [Discriminator, Generator]


# ---- Custom training and validation functions ----------------------------------------------------


def train(
    config: Any,
    models: Any,
    dataloader: Any,
    criterion: Any,
    optimizers: Any,
    scheduler: Any = None,
) -> dict[str, Any]:
    netD, netG = models
    optimD, optimG = optimizers
    real_label = 1.0
    fake_label = 0.0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    for _, data in enumerate(dataloader, 0):
        netD.zero_grad()
        real_cpu = data[0].to(device)
        b_size = real_cpu.size(0)
        label = torch.full((b_size,), real_label, device=device)
        output = netD(real_cpu).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()

        noise = torch.randn(b_size, latent_vector_size, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimD.step()

        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        optimG.step()

        is_score, is_std = inception_score(fake)

    return {"loss_g": errG.item(), "loss_d": errD.item(), "inception": is_score}


def custom_validate(
    config: Any, model: Any, val_iterator: Any, criterion: Any, scheduler: Any = None
) -> dict[str, float]:
    return {"validation_accuracy": 0.5}


def test_custom_training_and_validation_functions() -> None:
    trainer = PyTorchTrainer(
        several_models_creator,
        data_creator,
        several_optimizers_creator,
        nn.BCELoss,
        train_function=train,
        validation_function=custom_validate,
        num_replicas=2,
        use_gpu="auto",
        **QUICK,
    )
    results = [trainer.train() for _ in range(15)]
    validated = trainer.validate()
    weights = trainer.apply_all_workers(weights_of_workers)
    trainer.shutdown()
    assert set(results[0]) == {
        *("epoch", "batch_count", "num_samples", "loss_g", "loss_d", "inception")
    }
    assert validated["validation_accuracy"] == 0.5
    assert weights[0] == weights[1]


def weights_of_workers() -> Any:
    from paceline.creators import _replica as _replica_functions

    return [
        p.tolist() for model in _replica_functions._replica[0].models for p in model.parameters()
    ]
