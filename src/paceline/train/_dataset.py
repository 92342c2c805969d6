"""The data set that a run was given, as its workers see it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from paceline.data import Dataset

if TYPE_CHECKING:
    from paceline.train._loader import PreparedLoader
    from paceline.train._session import RankSession


class RunReader:
    """A worker that reads its part of the run's data sets.

    Args:
        session: The run.
    """

    def __init__(self, session: "RankSession") -> None:
        self.rank = session.rank_info.rank
        self.world_size = session.rank_info.world_size
        self._session = session

    def prepare(self, loader: Any, *, is_moved: bool) -> "PreparedLoader":
        """Return this worker's part of a loader."""
        return self._session.prepare_loader(loader, is_moved=is_moved)


def dataset_of(session: "RankSession | None", name: str | None) -> Dataset:
    """Return the data set of a run; see `train.get_dataset`."""
    if session is None:
        raise RuntimeError(
            "`get_dataset` gives what `Trainer.run(dataset=...)` was given, but this process works"
            " for no run. Hint: `if train.in_worker(): ... else: ...`."
        )
    if not session.job.has_dataset:
        raise RuntimeError(
            "`get_dataset` gives what `Trainer.run(dataset=...)` was given, but that got none."
            " Hint: trainer.run(train_func, dataset=my_data_set)."
        )
    data = session.job.dataset
    if isinstance(data, Mapping):
        if name is None and len(data) > 1:
            raise ValueError(
                f"`name` must say which data set is meant, but got None for {sorted(data)}."
            )
        if name is not None and name not in data:
            raise KeyError(f"There is no data set {name!r}, only {sorted(data)}.")
        data = data[name if name is not None else next(iter(data))]
    elif name is not None:
        raise KeyError(f"There is no data set {name!r}, as the run was given a single one.")
    is_data = isinstance(data, (Dataset, torch.utils.data.Dataset)) or hasattr(data, "__getitem__")
    if callable(data) and not is_data:
        # What is made in the worker need not travel.
        data = data()
    return Dataset(data).read_by(RunReader(session))
