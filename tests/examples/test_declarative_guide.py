"""The guide to config objects names what there is."""

import pytest
from guides import Guide

from paceline.config._read_yaml import parse_yaml
from paceline.declarative import TrainingConfig

GUIDE = Guide("docs/declarative.md")


def test_the_fields_of_the_file_exist() -> None:
    for text in GUIDE.blocks("yaml"):
        assert parse_yaml(text).keys() <= TrainingConfig.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    "name",
    ["PyTorchLightningTrainer", "HuggingFaceAccelerateTrainer", "HuggingFaceAcceleratePretrainer"],
)
def test_trainers_that_are_not_here_are_among_the_differences(name: str) -> None:
    rows = [line for line in GUIDE.text.splitlines() if line.startswith("|")]
    assert len([row for row in rows if f"`{name}`" in row]) == 1
