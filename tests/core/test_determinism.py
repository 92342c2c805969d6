"""The deterministic switches that `verify-resume` turns on."""

from collections.abc import Iterator

import pytest
import torch

from paceline import core
from paceline.testing._verify_resume import OPERATION


@pytest.fixture(autouse=True)
def own_switches(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = benchmark
    torch.set_deterministic_debug_mode("default")


def put() -> None:
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 1.0]))


def test_operations_are_left_alone_without_the_variable() -> None:
    with core.init():
        put()
    assert torch.get_deterministic_debug_mode() == 0


def test_operation_warns_by_name_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DETERMINISTIC", "warn")
    with core.init(), pytest.warns(UserWarning, match="^put_ does not") as warned:
        put()
    assert OPERATION.findall(str(warned[0].message)) == ["put_"]
    assert not torch.backends.cudnn.benchmark


def test_operation_raises_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DETERMINISTIC", "1")
    with pytest.raises(RuntimeError, match="^put_ does not have") as raised, core.init():
        put()
    assert OPERATION.findall(str(raised.value)) == ["put_"]


def test_other_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DETERMINISTIC", "yes")
    with pytest.raises(ValueError, match="PACELINE_DETERMINISTIC must be one of .*'yes'"):
        core.init()
