"""Turning on torch's deterministic switches from outside of a script."""

import os

DETERMINISM_VARIABLE = "PACELINE_DETERMINISTIC"

_MODES = ("1", "warn")


def apply_determinism() -> None:
    """Do what PACELINE_DETERMINISTIC asks for; nothing without it.

    With "1" an operation that has no deterministic implementation raises, with "warn" it warns
    and goes on.

    Raises:
        ValueError: The variable has another value.
    """
    mode = os.environ.get(DETERMINISM_VARIABLE)
    if not mode:
        return
    if mode not in _MODES:
        raise ValueError(f"{DETERMINISM_VARIABLE} must be one of {_MODES}, but got {mode!r}.")
    # Read when the first handle is made, so that it comes early enough here.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.backends.cudnn.benchmark = False
    # Unlike `use_deterministic_algorithms` this does not load torch's compiler.
    torch.set_deterministic_debug_mode("warn" if mode == "warn" else "error")
