"""The data set that a run was given, as its workers see it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.data import Dataset, Fold
from paceline.engine import RayDataset
from paceline.train._given_dataset import given_dataset, is_made, is_pair, is_several, made_dataset
from paceline.workers import RayShards

if TYPE_CHECKING:
    from paceline.engine import PreparedLoader, RankSession


class WorkerDatasetReader:
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


def dataset_of(session: "RankSession | None", name: str | int | None) -> Any:
    """Return the data set of a run; see `train.get_dataset`."""
    session, data = _given_datasets(session, "get_dataset")
    if not is_several(data):
        if name is not None:
            raise KeyError(f"There is no data set {name!r}, as the run was given a single one.")
        return _read_dataset(session, data)
    names = list(_by_name(data))
    if name is None and len(names) > 1:
        raise ValueError(
            f"`name` must say which data set is meant, but got None for {names}. Hint:"
            " get_datasets() gives all of them."
        )
    if name is not None and name not in names:
        raise KeyError(f"There is no data set {name!r}, only {names}.")
    return _read_dataset(session, _by_name(data)[names[0] if name is None else name])


def datasets_of(session: "RankSession | None") -> Any:
    """Return all data sets of a run; see `train.get_datasets`."""
    session, data = _given_datasets(session, "get_datasets")
    if isinstance(data, Mapping):
        return {name: _read_dataset(session, each) for name, each in data.items()}
    if is_pair(data):
        return _read_dataset(session, data)
    if not isinstance(data, (list, tuple)):
        return [_read_dataset(session, data)]
    return [_read_dataset(session, each) for each in data]


def _given_datasets(session: "RankSession | None", caller: str) -> tuple["RankSession", Any]:
    """Return the session, and what its run was given."""
    if session is None:
        raise RuntimeError(
            f"`{caller}` gives what `Trainer.run(dataset=...)` was given, but this process works"
            " for no run. Hint: `if train.in_worker(): ... else: ...`."
        )
    if not session.job.has_dataset:
        raise RuntimeError(
            f"`{caller}` gives what `Trainer.run(dataset=...)` was given, but that got none."
            " Hint: trainer.run(train_func, dataset=my_data_set)."
        )
    return session, _made_dataset(session, session.job.dataset)


def _made_dataset(session: "RankSession", data: Any) -> Any:
    """Return data, or what a function makes of the config; that need not travel."""
    if is_made(data):
        data = given_dataset(made_dataset(data, session.job.config))
    return data


def _by_name(data: Any) -> Mapping[Any, Any]:
    if isinstance(data, Mapping):
        return data
    return data._asdict() if isinstance(data, Fold) else dict(enumerate(data))


def _read_dataset(session: "RankSession", data: Any) -> Any:
    """Return a data set, or a pair of them, as this worker reads it."""
    data = _made_dataset(session, data)
    if isinstance(data, RayShards):
        return RayDataset(data, session)
    if is_pair(data):
        pair = [_read_dataset(session, each) for each in data]
        return Fold(*pair) if isinstance(data, Fold) else tuple(pair)
    return Dataset(data).read_by(WorkerDatasetReader(session))
