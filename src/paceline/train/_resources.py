"""Resources that workers request, and resources of this machine."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from paceline.workers import ResourcesError, num_cores

logger = logging.getLogger(__name__)

# How many workers for each core are more than a test would have.
_CROWD = 4
_NAMES = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker"}


class WorkerResources(NamedTuple):
    """Resources of each worker.

    Attributes:
        cpus: Its cores; None to share them.
        gpus: Its GPUs; None for one if there are any.
        others: What else it needs of a Ray cluster.
    """

    cpus: int | None
    gpus: float | None
    others: dict[str, float]

    def check_backend(self, backend: str | None) -> None:
        """Check that the workers can meet by a backend of torch.distributed.

        Raises:
            ValueError: They are to share GPUs, which NCCL refuses.
        """
        if backend == "nccl" and self.gpus is not None and 0 < self.gpus < 1:
            raise ValueError(
                "`gpus_per_worker` must be a whole number with the backend NCCL, which knows no"
                f" workers that share a GPU, but got {self.gpus!r}. Hint: TorchConfig(backend="
                '"gloo").'
            )

    def check_machine(self, num_workers: int) -> None:
        """Check that this machine can run so many workers.

        Raises:
            ValueError: They want a resource that machines do not have.
            ResourcesError: They want more than there is.
        """
        for name in self.others:
            raise ValueError(
                f"`resources_per_worker` must name resources of this machine, CPU or GPU, but got"
                f" {name!r}."
            )
        if self.cpus is None and num_workers > _CROWD * num_cores():
            logger.warning(
                "%d workers are to share %d CPU core(s), so each gets little time. Hint: fewer"
                " workers; `cpus_per_worker` makes it an error.",
                num_workers,
                num_cores(),
            )
        _check_available("CPU core(s)", "cpus_per_worker", num_workers, self.cpus or 0, num_cores)
        _check_available("GPU(s)", "gpus_per_worker", num_workers, self.gpus or 0, num_gpus)


def checked_resources(
    cpus: int | None, gpus: float | None, more: Mapping[str, float] | None
) -> WorkerResources:
    """Return the resources of each worker.

    Args:
        cpus: The cores of each; None to share them.
        gpus: The GPUs of each; None for one if there are any.
        more: The same by the names of Ray, "CPU" and "GPU", and others.

    Raises:
        TypeError: A number is none.
        ValueError: A resource is given twice, or below 0.
    """
    given: dict[str, Any] = {"CPU": cpus, "GPU": gpus}
    for name, amount in (more or {}).items():
        if given.get(name) not in (None, amount):
            raise ValueError(
                f"`resources_per_worker[{name!r}]` and `{_NAMES[name]}` must agree, but got"
                f" {amount!r} and {given[name]!r}. Hint: give one of them."
            )
        given[name] = amount
    for name, amount in given.items():
        if amount is not None and (
            isinstance(amount, bool) or not isinstance(amount, (int, float))
        ):
            argument = _NAMES.get(name, f"resources_per_worker[{name!r}]")
            raise TypeError(f"`{argument}` must be a number, but got {amount!r}.")
    cpus, gpus = given.pop("CPU"), given.pop("GPU")
    if cpus is not None and (cpus < 1 or cpus != int(cpus)):
        raise ValueError(f"`cpus_per_worker` must be an integer of at least 1, but got {cpus!r}.")
    if gpus is not None and gpus < 0:
        raise ValueError(f"`gpus_per_worker` must be at least 0, but got {gpus!r}.")
    return WorkerResources(None if cpus is None else int(cpus), gpus, given)


def machine_capacity(cpus: int | None, gpus: float | None) -> int:
    """Return how many workers fit on this machine; `sys.maxsize` if they ask for nothing.

    Args:
        cpus: The cores of each.
        gpus: The GPUs of each.
    """
    fitting = [sys.maxsize]
    if cpus:
        fitting.append(num_cores() // cpus)
    if gpus:
        fitting.append(int(num_gpus() // gpus))
    return min(fitting)


def num_gpus() -> int:
    """Return the number of GPUs of this machine."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.cuda.device_count())
    return _num_listed_gpus()


@cache
def _num_listed_gpus() -> int:
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    listing = subprocess.run(
        [command, "--list-gpus"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def _check_available(
    unit: str, name: str, num_workers: int, amount: float, num_available: Any
) -> None:
    wanted = num_workers * amount
    if not wanted:
        return
    available = num_available()
    if wanted > available:
        raise ResourcesError(
            f"{num_workers} worker(s) with `{name}`={amount:g} need {wanted:g} {unit}, but this"
            f" machine has {available}. Hint: fewer workers, or less for each."
        )
