"""The guide to config objects names what there is."""

from guides import Guide

from paceline.config._read_yaml import parse_yaml
from paceline.declarative import TrainingConfig

GUIDE = Guide("docs/declarative.md")


def test_the_fields_of_the_file_exist() -> None:
    for text in GUIDE.blocks("yaml"):
        assert parse_yaml(text).keys() <= TrainingConfig.__dataclass_fields__.keys()
