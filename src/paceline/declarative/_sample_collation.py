"""Splitting and batching of data sets with lists of items as samples."""

import logging
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Subset

from paceline.data._default_batches import collate_samples
from paceline.data._order_and_random_generators import note_samples

logger = logging.getLogger(__name__)

Collate: TypeAlias = Callable[[Any], list[Any]]


def split(dataset: Any, validation_ratio: float, seed: int) -> tuple[Any, Any]:
    """Split a data set at random, as the seed and its length decide.

    Raises:
        ValueError: One part would be empty.
    """
    size = len(dataset)
    num_validated = math.ceil(validation_ratio * size)
    if not 0 < num_validated < size:
        raise ValueError(
            f"`validation_ratio` must leave samples for training and for validation, but"
            f" {validation_ratio} of {size} are {num_validated}. Hint: give `training_dataset`"
            " and `validation_dataset`."
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(size, generator=generator).tolist()
    return Subset(dataset, order[num_validated:]), Subset(dataset, order[:num_validated])


class SampleForm(Enum):
    """How a data set gives its samples."""

    # Each sample is a tuple or a single item, without an axis for the samples.
    PLAIN = "plain"
    # Every tensor has a first axis of size 1, along which batches are concatenated.
    LEADING_AXIS = "with a leading sample axis"
    # `__getitems__` gives whole batches, item by item.
    BATCHES = "whole batches"


def form_of(dataset: Any, name: str, num_inputs: int | None, is_leading: bool | None) -> SampleForm:
    """Look at the first sample of a data set.

    Args:
        dataset: The data set.
        name: Its name, for messages.
        num_inputs: The items of a sample before its labels; None without labels.
        is_leading: Whether tensors have a first axis of size 1; None to find it out.

    Raises:
        ValueError: The data set is empty, a sample has too few items, or one lacks the first axis.
    """
    if not len(dataset):
        raise ValueError(f"`{name}` must have samples, but is empty.")
    if type(dataset) is Subset:
        # Subsets fetch through the data set below, so that data set decides the form.
        return form_of(dataset.dataset, name, num_inputs, is_leading)
    fetch = getattr(dataset, "__getitems__", None)
    try:
        found = dataset[0] if fetch is None else fetch([0])
    except Exception as error:
        note_samples(error, dataset, [0])
        raise
    is_batch = fetch is not None and not (
        isinstance(found, list) and len(found) == 1 and isinstance(found[0], (tuple, list))
    )
    sample = found if fetch is None or is_batch else found[0]
    items = list(sample) if isinstance(sample, (tuple, list)) else [sample]
    if num_inputs is not None and len(items) <= num_inputs:
        raise ValueError(
            f"A sample of `{name}` must have labels from item {num_inputs} on, as"
            f" `data_label_separation_index` is {num_inputs}, but has {len(items)} item(s)."
        )
    if is_batch:
        return SampleForm.BATCHES
    if is_leading is None:
        is_leading = _looks_leading(items[:num_inputs], items)
        logger.log(
            logging.INFO if name == "training_dataset" else logging.DEBUG,
            "The samples of `%s` are taken as %s axis of size 1 for samples."
            " `leading_sample_axis` says otherwise.",
            name,
            "tensors with a first" if is_leading else "ordinary ones, without an",
        )
    elif is_leading and any(not torch.as_tensor(item).dim() for item in items):
        raise ValueError(
            "`leading_sample_axis` must be False or None, as an item of a sample of"
            f" `{name}` has no axis."
        )
    return SampleForm.LEADING_AXIS if is_leading else SampleForm.PLAIN


def _looks_leading(inputs: Sequence[Any], items: Sequence[Any]) -> bool:
    """Return whether all tensors have a first axis of size 1, and an input has more axes."""
    shapes = [tuple(getattr(item, "shape", ())) for item in items]
    has_more = any(len(getattr(item, "shape", ())) > 1 for item in inputs)
    return has_more and all(shape[:1] == (1,) for shape in shapes)


def collate_of(form: SampleForm) -> Collate:
    """Return the collate function of a form: samples to a list of batched items.

    It is called with every step, so the form is asked for once.
    """
    return _COLLATES[form]


def _join_plain(samples: Any) -> list[Any]:
    batch = collate_samples(samples)
    return batch if isinstance(batch, list) else [batch]


def _join_leading(samples: Any) -> list[Any]:
    rows = [_as_items(sample) for sample in samples]
    return [torch.cat(list(map(torch.as_tensor, item))) for item in zip(*rows, strict=True)]


def _take_batch(samples: Any) -> list[Any]:
    return [torch.as_tensor(item) for item in _as_items(samples)]


_COLLATES: dict[SampleForm, Collate] = {
    SampleForm.PLAIN: _join_plain,
    SampleForm.LEADING_AXIS: _join_leading,
    SampleForm.BATCHES: _take_batch,
}


def _as_items(sample: Any) -> Sequence[Any]:
    return sample if isinstance(sample, (tuple, list)) else (sample,)


def loader_of(
    dataset: Any,
    form: SampleForm,
    *,
    num_workers: int,
    batch_size: int,
    is_shuffled: bool,
    pins: bool,
) -> "DataLoader[Any]":
    """Return a loader of a shard's batches.

    Args:
        dataset: The data.
        form: How it gives its samples.
        num_workers: Processes that load.
        batch_size: Samples of a batch.
        is_shuffled: Whether the order changes from epoch to epoch.
        pins: Whether batches are put into pinned memory.
    """
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=is_shuffled,
        num_workers=num_workers,
        pin_memory=pins,
        collate_fn=collate_of(form),
    )
