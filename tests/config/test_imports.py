import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["torch", "numpy", "fastapi", "httpx2", "paceline.search"])
def test_importing_the_config_package_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, paceline.config; sys.exit({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
