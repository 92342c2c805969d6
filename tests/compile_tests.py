"""Compile all tests as pytest wants them: with assertions that tell their values.

Else each process of `pytest -n` does that for itself, where Python may not store what it compiles.
This needs functions that pytest keeps for itself; where they change, pytest compiles as ever.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from _pytest.assertion import rewrite


def compile_test(path: Path) -> None:
    """Store what pytest runs of a file, unless it is there."""
    directory = rewrite.get_cache_dir(path)
    stored = directory / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, stored) is None:
        directory.mkdir(parents=True, exist_ok=True)
        no_options = SimpleNamespace(getini=lambda name: False, get_verbosity=lambda kind: 0)
        source, code = rewrite._rewrite_test(path, no_options)  # type: ignore[arg-type] # enough
        rewrite._write_pyc(SimpleNamespace(trace=print), code, source, stored)  # type: ignore[arg-type] # enough


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    tests = Path(__file__).parent
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_test, [*tests.rglob("test_*.py"), *tests.rglob("conftest.py")]))
