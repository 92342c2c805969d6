"""The Trial class for DeepSpeed: ZeRO 1, 2 and 3 with the same trainer, checkpoints and resume."""

from paceline.pytorch.deepspeed._context import DeepSpeedTrialContext
from paceline.pytorch.deepspeed._init import init
from paceline.pytorch.deepspeed._trainer import Trainer
from paceline.pytorch.deepspeed._trial import DeepSpeedTrial

__all__ = ["DeepSpeedTrial", "DeepSpeedTrialContext", "Trainer", "init"]
