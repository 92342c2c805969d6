"""Data sets of Ray Data, which Ray splits to the workers of a run on its cluster."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

from paceline.workers.remote._ray_cluster import import_ray, join_ray

logger = logging.getLogger(__name__)


def is_ray_dataset(value: Any) -> bool:
    """Tell whether a value is a data set of Ray Data; this loads nothing."""
    data = sys.modules.get("ray.data")
    return data is not None and isinstance(value, data.Dataset)


class RayShards:
    """Parts of a Ray data set, one for each worker of a generation.

    The parts have equally many rows. The driver keeps this object until the workers have ended, as
    Ray ends what reads the data when nobody refers to it.

    Args:
        dataset: The data set.
        num_workers: How many workers there are.
    """

    def __init__(self, dataset: Any, num_workers: int) -> None:
        ray = import_ray()
        self._iterators: Any = dataset.streaming_split(num_workers, equal=True)
        self._pickled = [ray.cloudpickle.dumps(each) for each in self._iterators]
        context = ray.get_runtime_context()
        self._address, self._namespace = context.gcs_address, context.namespace

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterators": None}

    def of_rank(self, rank: int) -> Any:
        """Return a rank's part in this process, which is connected to Ray for that."""
        return join_ray(self._address, self._namespace).cloudpickle.loads(self._pickled[rank])


def dealt(data: Any, num_workers: int) -> Any:
    """Return what a run was given, with each Ray data set split to the workers."""
    if is_ray_dataset(data):
        return RayShards(data, num_workers)
    if isinstance(data, Mapping):
        return {name: dealt(each, num_workers) for name, each in data.items()}
    if isinstance(data, (list, tuple)) and _has_ray_data(data):
        parts = [dealt(each, num_workers) for each in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return data


def check_ray_data(data: Any, cluster: str) -> None:
    """Check that the workers can read the Ray data sets of a run, and say what is different.

    Raises:
        TypeError: The workers are not on a Ray cluster.
    """
    if not _has_ray_data(data):
        return
    if cluster != "ray":
        raise TypeError(
            "A Ray data set must be read by workers on its Ray cluster, but those of this trainer"
            ' are on this machine without Ray. Hint: Trainer(cluster="ray"); or'
            " `dataset.write_parquet(path)` and `paceline.data.read(path)`, which also has an exact"
            " order; or `dataset.take_all()` if it is small."
        )
    logger.warning(
        "Ray splits this data set: its order can differ from run to run, each worker gets equally"
        " many rows, so that up to one row per worker is left out, and a run that goes on from a"
        " checkpoint begins its epoch anew. Hint: `paceline.data.read` has an exact order."
    )


def _has_ray_data(data: Any) -> bool:
    if isinstance(data, Mapping):
        return any(map(_has_ray_data, data.values()))
    if isinstance(data, (list, tuple)):
        # Samples can be many, and none of them is a data set then.
        return bool(data) and any(map(_has_ray_data, data[:2]))
    return is_ray_dataset(data)
