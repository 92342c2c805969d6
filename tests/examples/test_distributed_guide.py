"""What the guide to several processes shows runs."""

from collections.abc import Callable
from typing import Any

import pytest
from guides import Guide, line_trial

GUIDE = Guide("docs/distributed.md")


@pytest.mark.long
def test_the_function_runs_in_workers(run_with_torch: Callable[..., Any]) -> None:
    call = "values = pytorch.launch(main, num_workers=4, args=(3,))"
    assert f"`{call}`" in GUIDE.text
    code = GUIDE.block("def main(").replace("from line import LineTrial\n", line_trial())
    call = call.replace("num_workers=4", "num_workers=1")
    end = "metrics, model = values[0]\n    assert metrics['epochs'] == 3 and len(values) == 1\n"
    done = run_with_torch(code.replace("    main()\n", f"    {call}\n    {end}"))
    assert done.returncode == 0, done.stderr
