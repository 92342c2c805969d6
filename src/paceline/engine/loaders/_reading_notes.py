"""Notes on errors of reading samples: which samples were read, and what to do."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from paceline._errors import add_note, text_of

_BEGIN = "While reading"
_MOST_NUMBERS = 16
# By words of torch's messages.
_LOST_PROCESS = (
    "Hint: a process of the data loader was killed, as happens if the memory runs out. Use fewer"
    " `num_workers` or smaller batches."
)
_HINTS = {
    "exited unexpectedly": _LOST_PROCESS,
    "DataLoader timed out after": (
        "Hint: a process of the data loader gave no batch within the loader's `timeout`. Look at"
        " what the data set waits for, or raise `timeout`."
    ),
}


def note_samples(error: BaseException, dataset: Any, batch: Sequence[Any]) -> None:
    """Add to an error which samples were read when it was raised.

    Args:
        error: The error.
        dataset: The data set.
        batch: The numbers of the samples, or of those of several shards.
    """
    hint = next((hint for words, hint in _HINTS.items() if words in text_of(error)), None)
    if hint is None and _is_broken_connection(error):
        hint = _LOST_PROCESS
    if hint is not None:
        add_note(error, hint)
    elif batch and _BEGIN not in f"{text_of(error)} {getattr(error, '__notes__', '')}":
        add_note(
            error, f"{_BEGIN} {_failed_samples(error, dataset) or _listed_samples(dataset, batch)}."
        )


def _is_broken_connection(error: BaseException) -> bool:
    """Tell whether a loader's process ended while it sent a batch; torch does not say so."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    is_kind = isinstance(error, (EOFError, ConnectionError, FileNotFoundError))
    module = "" if step is None else step.tb_frame.f_globals.get("__name__", "")
    return is_kind and module == "multiprocessing.connection"


def _failed_samples(error: BaseException, dataset: Any) -> str | None:
    """Return the sample whose `__getitem__` failed, if the traceback shows one."""
    step = error.__traceback__
    while step is not None:
        code, values = step.tb_frame.f_code, step.tb_frame.f_locals
        if code.co_name == "__getitem__" and code.co_argcount == 2:
            owner, number = (values.get(name) for name in code.co_varnames[:2])
            if owner is dataset or isinstance(owner, Dataset):
                return f"sample {number!r} of {type(owner).__name__}"
        step = step.tb_next
    return None


def _listed_samples(dataset: Any, batch: Sequence[Any]) -> str:
    parts = [part if isinstance(part, list) else [part] for part in batch]
    numbers = [number for part in parts for number in part]
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    more = ", ..." if len(numbers) > _MOST_NUMBERS else ""
    noun = "sample" if len(numbers) == 1 else "samples"
    return f"{noun} {shown}{more} of {type(dataset).__name__}"
