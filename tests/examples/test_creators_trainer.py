"""The examples of creators: default functions, functions of one's own, two models."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]


@pytest.fixture
def example_name() -> str:
    """Return the name of the example."""
    return "creators_trainer"


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return an environment with no Fashion-MNIST."""
    return {**environment, "FASHION_MNIST": str(tmp_path / "nowhere")}


def numbers(pattern: str, output: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, output)]


@pytest.mark.slow
def test_default_functions_learn_and_another_trainer_goes_on(run: Run) -> None:
    output = run("train_example.py", "--passes", "3")
    accuracies = numbers(r"pass \d: loss [\d.]+, accuracy ([\d.]+)%", output)
    assert len(accuracies) == 3
    assert accuracies[-1] > 70
    assert f"The other trainer recognises {accuracies[-1]:.1f}% as well." in output


@pytest.mark.slow
def test_a_residual_net_learns_by_functions_of_its_own(run: Run) -> None:
    output = run("resnet18.py", "--width", "8", "--passes", "3")
    assert "worker 1 of 2 begins" in output
    (accuracy,) = numbers(r"A net of 176,258 weights recognises ([\d.]+)%", output)
    assert accuracy > 60


@pytest.mark.slow
def test_a_generator_learns_against_a_discriminator(run: Run) -> None:
    output = run("dcgan.py", "--passes", "6")
    (before,) = numbers(r"The inception score was ([\d.]+)", output)
    (after,) = numbers(r"and is ([\d.]+)\.\n", output)
    assert before < 1.5
    assert after > 3


def test_every_file_is_in_the_guide(example: Path) -> None:
    named = set(re.findall(r"`(\w+\.py)`", (example / "README.md").read_text()))
    assert named == {path.name for path in example.glob("*.py")}
