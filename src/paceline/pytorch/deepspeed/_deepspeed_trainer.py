"""The trainer of trials for DeepSpeed."""

from paceline.pytorch._pytorch_trial import PyTorchTrial
from paceline.pytorch._trial_trainer import Trainer as PyTorchTrainer
from paceline.pytorch._trial_training import TrialTraining
from paceline.pytorch.deepspeed._deepspeed_context import DeepSpeedTrialContext
from paceline.pytorch.deepspeed._deepspeed_training import DeepSpeedTraining, DeepSpeedValidator
from paceline.pytorch.deepspeed._deepspeed_trial import DeepSpeedTrial


class Trainer(PyTorchTrainer):
    """Train a `DeepSpeedTrial`; `fit` and all else are those of `pytorch.Trainer`.

    A batch is one optimizer step of the engines: `gradient_accumulation_steps` micro-batches on
    each rank. At the end of an epoch, samples that make no whole batch are left out.

    Args:
        trial: The trial.
        context: The context that the trial was made with.

    Raises:
        TypeError: `trial` is no `DeepSpeedTrial`, or `context` none of `pytorch.deepspeed.init`.
        ValueError: No engine is wrapped, or not exactly one evaluate method is overridden.
    """

    def _make_training(self, trial: PyTorchTrial) -> TrialTraining:
        context = self._context
        if not isinstance(trial, DeepSpeedTrial):
            raise TypeError(f"`trial` must be a DeepSpeedTrial, but got {type(trial).__name__}.")
        if not isinstance(context, DeepSpeedTrialContext):
            raise TypeError(
                f"`context` must be a DeepSpeedTrialContext, but got {type(context).__name__}."
                " Hint: with pytorch.deepspeed.init() as context."
            )
        if not context.engines:
            raise ValueError(
                "A trial must wrap at least one engine. Hint: self.engine ="
                " context.wrap_model_engine(engine) in its `__init__`."
            )
        return DeepSpeedTraining(trial, context, DeepSpeedValidator(trial, context))
