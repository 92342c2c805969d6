"""The guide to the train function names every function."""

import re

from guides import Guide

from paceline import train

GUIDE = Guide("docs/train.md")


def test_every_function_is_named() -> None:
    functions = {name for name in train.__all__ if name.islower()}
    assert len(functions) == 25
    assert functions <= set(re.findall(r"\w+", GUIDE.text))
