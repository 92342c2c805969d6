"""Facts about a trial that a checkpoint holds besides the training state."""

import sys
from pathlib import Path
from typing import Any

from paceline.pytorch._trial_context import PyTorchTrialContext


def trial_checkpoint_facts(trial: object, context: PyTorchTrialContext) -> dict[str, Any]:
    """Return what `load_trial_from_checkpoint_path` needs to build the trial again."""
    kind = type(trial)
    module, source = kind.__module__, None
    if module == "__main__":
        main = sys.modules["__main__"]
        source = Path(getattr(main, "__file__", None) or "a notebook").name
        # A program that was started by `python -m` can be imported by that name.
        module = getattr(getattr(main, "__spec__", None), "name", None) or module
    hparams, unstored = checkpoint_hparams(context)
    return {
        "trial": {"class": f"{module}:{kind.__qualname__}", "source": source},
        "hparams": hparams,
        "unstored_hparams": unstored,
        "data_config": context.get_data_config(),
    }


def checkpoint_hparams(context: PyTorchTrialContext) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the hyperparameters that a checkpoint holds, and the names of the others."""
    try:
        given = context.get_hparams()
    except ValueError:
        return None, []
    plain = {name: value for name, value in given.items() if _is_plain(value)}
    return plain, sorted(given.keys() - plain.keys())


def _is_plain(value: Any) -> bool:
    """Tell whether a hyperparameter can be stored."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    is_scalar = hasattr(value, "item") and getattr(value, "shape", None) == ()
    return value is None or isinstance(value, (bool, int, float, str)) or is_scalar
