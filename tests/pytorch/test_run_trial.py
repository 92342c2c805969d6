import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.pytorch import PyTorchTrial
from paceline.pytorch.run_trial import RunTrialError, load_trial_class, main

MODULE = """
from paceline import pytorch

class Other(pytorch.PyTorchTrial): pass
class Mine(pytorch.PyTorchTrial): pass
class Plain: pass
def function(): pass
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a working directory of code; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    # As the interpreter's option -P has it.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "trials_here.py").write_text(MODULE)
    (tmp_path / "trials_package").mkdir()
    (tmp_path / "trials_package" / "model.py").write_text(MODULE)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("module", ["trials_here", "trials_package.model"])
def test_a_trial_class_comes_from_the_working_directory(directory: Path, module: str) -> None:
    found = load_trial_class(f"{module}:Mine")
    assert issubclass(found, PyTorchTrial)
    assert (found.__module__, found.__name__) == (module, "Mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trials_nowhere:Mine", r"`trials_nowhere` must be in .* no `trials_nowhere`\. Hint: DIR"),
        ("trials_package.no:Mine", r"`trials_package.no` must be in .* no `trials_package.no`\."),
        ("no_package.model:Mine", r"`no_package.model` must be in .* there is no `no_package`\."),
        ("trials_here:Nine", r"must have the class `Nine`, .* Its trial classes: Mine, Other\."),
        ("trials_here:Plain", r"must be a subclass of .*, but is another class\. .*: Mine, Other"),
        ("trials_here:function", r"must be a subclass of .*, but is a function\."),
        ("trials_here:pytorch", r"must be a subclass of .*, but is a module\."),
    ],
)
def test_what_is_no_trial_class_is_told(directory: Path, name: str, message: str) -> None:
    with pytest.raises(RunTrialError, match=message):
        load_trial_class(name)


def test_what_a_module_itself_lacks_is_not_taken_for_the_module(directory: Path) -> None:
    (directory / "trials_broken.py").write_text("import not_installed")
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_installed'"):
        load_trial_class("trials_broken:Mine")


def test_a_trial_class_without_an_experiment_is_refused_with_the_command(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_RUN_DIR", raising=False)
    with pytest.raises(RunTrialError, match="Hint: paceline experiment create CONFIG DIR --local"):
        main(["trials_here:Mine"])


@pytest.mark.parametrize("arguments", [[], ["--help"], ["trials_here"], ["a:B", "c"]])
def test_wrong_arguments_show_the_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: python3 -m paceline.pytorch.run_trial")
