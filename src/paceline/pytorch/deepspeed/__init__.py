"""The Trial class for DeepSpeed: ZeRO 1, 2 and 3 with the same trainer, checkpoints and resume."""

from paceline.pytorch.deepspeed._deepspeed_context import DeepSpeedTrialContext
from paceline.pytorch.deepspeed._deepspeed_init import init
from paceline.pytorch.deepspeed._deepspeed_trainer import Trainer
from paceline.pytorch.deepspeed._deepspeed_trial import DeepSpeedTrial

__all__ = ["DeepSpeedTrial", "DeepSpeedTrialContext", "Trainer", "init"]
