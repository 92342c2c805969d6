"""Import torch without its compiler.

The first optimizer of a process imports torch's compiler, which takes as long as all the rest of
the start, though nothing here is compiled. The tests start a hundred processes, so an empty module
stands in its place.
"""

import sys
import types

import torch

compiler = types.ModuleType("torch._dynamo")
compiler.disable = lambda function=None, *_, **__: function  # type: ignore[attr-defined]
compiler.graph_break = lambda *_, **__: None  # type: ignore[attr-defined]
compiler.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)  # type: ignore[attr-defined]
sys.modules["torch._dynamo"] = compiler
torch._dynamo = compiler  # type: ignore[assignment]
