"""What the guide to several processes shows runs."""

from collections.abc import Callable
from typing import Any

from guides import Guide, line_trial

GUIDE = Guide("docs/distributed.md")


def test_the_function_runs_in_workers(run_with_torch: Callable[..., Any]) -> None:
    call = "values = pytorch.launch(main, num_workers=4, args=(3,))"
    assert f"`{call}`" in GUIDE.text
    code = line_trial() + "class MyTrial(LineTrial): pass\n" + GUIDE.block("def main(")
    code = code.replace('"global_batch_size": 64', '"global_batch_size": 64, "lr": 0.1')
    end = "metrics, model = values[0]\nassert metrics['epochs'] == 3 and len(values) == 1\n"
    done = run_with_torch(f"{code}\n{call.replace('num_workers=4', 'num_workers=1')}\n{end}")
    assert done.returncode == 0, done.stderr
