"""What the guide to the trainer lists is all there is."""

import re

import yaml
from guides import Guide, line_trial

from paceline import pytorch
from paceline.config import validate_config

GUIDE = Guide("docs/pytorch.md")


def test_other_guides_use_the_first_trial_of_this_one() -> None:
    trial = GUIDE.blocks("python")[0].partition("HPARAMS =")[0].strip()
    assert line_trial().endswith(f"\n\n{trial}\n")


def test_the_config_is_valid() -> None:
    config = validate_config(yaml.safe_load(GUIDE.blocks("yaml")[0]))
    assert not config.warnings


def test_every_hook_is_listed() -> None:
    table = GUIDE.text.partition("## Callbacks")[2].partition("## Piece by piece")[0]
    listed = set(re.findall(r"`(\w+)\([\w, ]*\)`", table))
    assert listed == {name for name in vars(pytorch.PyTorchCallback) if not name.startswith("__")}
    assert len(listed) == 17


def test_every_mode_of_a_scheduler_is_listed() -> None:
    for mode in pytorch.LRScheduler.StepMode:
        assert f"| `{mode.name}` |" in GUIDE.text
