"""Processes of tests: the stand-ins for parts of torch work as those, and forks load nothing."""

import os
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
assert "torch.export.exported_program" not in sys.modules
import torch.export.graph_signature
assert torch.export is sys.modules["torch.export"]
assert torch.export.graph_signature.ExportGraphSignature
assert torch.export.export.__module__ == "torch.export"
import torch._dynamo.config
from torch._dynamo import utils
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert utils is sys.modules["torch._dynamo.utils"]
assert torch.equal(torch.compile(torch.sin, backend="eager")(torch.ones(3)), torch.ones(3).sin())
train()
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
assert zero_grad.__dynamo_disable is not zero_grad
"""

WITHOUT_DATA = """
import gc
import sys

# As in servers that fork workers.
gc.disable()
import torch

assert not gc.isenabled()

assert type(torch.Generator) is torch._opaque_base.OpaqueBaseMeta
assert torch.Generator().manual_seed(1).initial_seed() == 1
torch.nn.Linear(2, 2, device="meta").to_empty(device="cpu")
assert "torch._decomp" not in sys.modules
%s
assert torch._meta_registrations is sys.modules["torch._meta_registrations"]
assert torch._meta_registrations.__file__
assert torch.ones(2, 3, device="meta").flip(0).shape == (2, 3)
assert torch.equal(torch.compile(torch.sin, backend="eager")(torch.ones(3)), torch.ones(3).sin())
"""

FAKE = (
    WITHOUT_DATA
    % """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    assert torch.nn.functional.pad(torch.ones(1, 2, 3), (1, 1), "reflect").shape == (1, 2, 5)
"""
)

TABLES = (
    WITHOUT_DATA
    % """
import torch._decomp
assert torch._decomp.__spec__.submodule_search_locations
assert torch.ops.aten.reflection_pad1d.default in torch._decomp.meta_table
"""
)


ADDRESSES = """
import sys
import jsonschema

assert "rfc3987_syntax.syntax_helpers" not in sys.modules
checker = jsonschema.FormatChecker()
assert checker.conforms("http://a.example/caf\u00e9", "iri")
assert not checker.conforms("no address", "iri")
import rfc3987_syntax.syntax_helpers
assert rfc3987_syntax.syntax_helpers is sys.modules["rfc3987_syntax.syntax_helpers"]
assert rfc3987_syntax.is_valid_syntax is rfc3987_syntax.syntax_helpers.is_valid_syntax
"""


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [SCRIPT, FAKE, pytest.param(TABLES, marks=pytest.mark.slow), ADDRESSES],
    ids=["compiler", "fake", "tables", "addresses"],
)
def test_what_is_left_out_is_loaded_as_soon_as_something_wants_it(
    script: str, run_python: Callable[..., Any]
) -> None:
    path = str(Path(__file__).parent / "quick_start")
    done = run_python(script, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


def test_forked_masters_have_loaded_the_server(master_server: Any, tmp_path: Path) -> None:
    """Otherwise each takes a second of processor time more, and nothing else shows it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "loaded = set(sys.modules)\n"
        "from paceline._cluster.master.server import serve\n"
        "print(sorted(set(sys.modules) - loaded))\n"
    )
    done = master_server.run_to_end(str(script), directory=tmp_path, environment=dict(os.environ))
    assert (done.stdout, done.stderr) == ("[]\n", "")
