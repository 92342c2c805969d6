"""One trainer of train functions, called by several threads at once."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from paceline import train

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return "done"


def call_twice(call: Callable[[], Any], on_end: Callable[[], None]) -> list[Any]:
    """Call from two threads that begin together; return what they returned or raised."""
    said: list[Any] = []
    begin = threading.Barrier(2)

    def run() -> None:
        begin.wait()
        try:
            said.append(call())
        except Exception as error:
            said.append(error)
        on_end()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_run_is_refused_while_that_of_another_thread_goes_on(
    tmp_path: Path, is_warm: bool
) -> None:
    path = tmp_path / "end"
    with train.Trainer(num_workers=2) as trainer:
        if is_warm:
            trainer.start()
        said = call_twice(lambda: trainer.run(lambda: wait_for(path)), path.touch)
        refused = [one for one in said if isinstance(one, Exception)]
        assert len(refused) == 1
        with pytest.raises(RuntimeError, match="before the next one begins, but one is under way"):
            raise refused[0]
        assert [list(one) for one in said if one not in refused] == [["done", "done"]]
        assert list(trainer.run(lambda: 3)) == [3, 3]


@pytest.mark.parametrize("is_warm", [False, True])
def test_functions_of_two_threads_are_executed_one_after_the_other(is_warm: bool) -> None:
    with train.Trainer(num_workers=2) as trainer:
        if is_warm:
            trainer.start()
        assert call_twice(lambda: trainer.execute(lambda: 3), lambda: None) == [[3, 3], [3, 3]]
