"""The stand-in for torch's compiler, which `make test` uses: torch must work as without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

def train():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())

train()
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.distributed.destroy_process_group()
assert "torch._dynamo.eval_frame" not in sys.modules
import torch._dynamo.config
from torch._dynamo import utils
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert utils is sys.modules["torch._dynamo.utils"]
assert torch.equal(torch.compile(torch.sin, backend="eager")(torch.ones(3)), torch.ones(3).sin())
train()
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
assert zero_grad.__dynamo_disable is not zero_grad
"""


@pytest.mark.parametrize(
    "module",
    [pytest.param("torch.distributed.tensor", marks=pytest.mark.slow), "torch.distributed.fsdp"],
)
def test_modules_that_look_through_all_others_do_not_load_it(
    module: str, run_python: Callable[..., Any]
) -> None:
    path = str(Path(__file__).parent / "quick_start")
    script = f"import torch\ntorch.optim.Adam([torch.nn.Parameter(torch.ones(1))])\nimport {module}"
    done = run_python(script, PYTHONWARNINGS="error", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


def test_the_compiler_is_loaded_as_soon_as_something_wants_it(
    run_python: Callable[..., Any],
) -> None:
    path = str(Path(__file__).parent / "quick_start")
    done = run_python(SCRIPT, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
