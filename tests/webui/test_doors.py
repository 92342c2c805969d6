"""Runs of each front door, as they come, in the pages of the web UI."""

import re
import subprocess
import sys
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

DATA = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))
"""
SCRIPTS = {
    "pytorch": """
from paceline import pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(4, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build_training_data_loader(self):
        return pytorch.DataLoader(data, batch_size=8)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": nn.functional.mse_loss(self.model(batch[0]), batch[1])}

with pytorch.init(hparams={"global_batch_size": 8}) as context:
    pytorch.Trainer(Trial(context), context).fit(
        max_length=pytorch.Batch(24),
        reporting_period=pytorch.Batch(4),
        validation_period=pytorch.Batch(8),
    )
""",
    "function": """
from paceline import train

def fit():
    for step in range(1, 9):
        train.report(loss=1 / step, time=2.0 * step)

with train.Trainer(num_workers=1) as trainer:
    trainer.run(fit)
""",
    "creators": """
from paceline.creators import PyTorchTrainer

with PyTorchTrainer(
    lambda config: nn.Linear(4, 1),
    lambda config: (data, data),
    lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
    nn.MSELoss,
    dataloader_config={"num_workers": 0},
) as trainer:
    for _ in range(3):
        trainer.train()
        trainer.validate()
""",
    "declarative": """
from paceline.declarative import ModelParameters, Trainer, TrainingConfig

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

trainer = Trainer(
    TrainingConfig(
        model_class=Net,
        model_params=ModelParameters(),
        dataset=data,
        pred_names=["sum"],
        loss_function=nn.MSELoss(),
        num_epochs=3,
        model_save_dir="results",
    )
)
trainer.build()
trainer.run_training()
""",
}


@pytest.fixture(scope="module")
def runs(
    master_of: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Any:
    """Return a master that watches a directory with a run of each front door that is tested."""
    project = tmp_path_factory.mktemp("doors")
    running = []
    items = [item for item in request.session.items if item.path == request.path]
    for name in {item.callspec.params["name"]: None for item in items}:
        path = project / f"{name}.py"
        path.write_text(f"{DATA}{SCRIPTS[name]}")
        command = [sys.executable, path]
        running.append(subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE, text=True))
    for process in running:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    home = tmp_path_factory.mktemp("home")
    started = master_of(home, "--runs", project / "paceline_runs")
    yield started
    started.stop()


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "pytorch" else pytest.mark.slow) for name in SCRIPTS],
)
def test_every_page_of_its_runs_can_be_looked_at(
    runs: Any, open_page: Any, name: str, unfold: Any, scroll_to: Any
) -> None:
    page = open_page(runs, "/experiments")
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.locator("header").get_by_text("Completed")).to_be_visible()
    drawn = page.get_by_role("img", name=re.compile(r"^Learning curves.*: 1 line"))
    expect(drawn).to_be_visible()
    page.get_by_role("link", name=re.compile("^Trials")).click()
    page.get_by_role("table").get_by_role("link").first.click()
    chart = page.get_by_role("img", name=re.compile("^loss: "))
    scroll_to(chart)
    expect(chart).to_be_visible()
    choices = page.get_by_role("combobox", name="X axis")
    unfold(page)
    choices.click()
    options = page.get_by_role("option")
    expect(options.first).to_have_text("Batches")
    for option in options.all_inner_texts()[1:]:
        page.get_by_role("option", name=option, exact=True).click()
        scroll_to(chart)
        expect(chart).to_be_visible()
        choices.click()
    page.keyboard.press("Escape")
    for tab in page.get_by_role("main").get_by_role("navigation").get_by_role("link").all():
        tab.click()
        expect(page.get_by_text("This page failed")).to_have_count(0)
