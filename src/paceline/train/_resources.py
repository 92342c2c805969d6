"""What workers want, and what this machine has."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from paceline.workers import ResourcesError, num_cores

_NAMES = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker"}


def checked_resources(
    num_workers: int,
    cpus: int | None,
    gpus: float | None,
    more: Mapping[str, float] | None,
) -> tuple[int | None, float | None]:
    """Return the cores and GPUs of each worker.

    Args:
        num_workers: How many workers there are at least.
        cpus: The cores of each; None to share them.
        gpus: The GPUs of each; None for one if there are any.
        more: The same by the names of Ray: "CPU" and "GPU".

    Raises:
        TypeError: A number is none.
        ValueError: A resource is unknown, given twice, or below 0.
        ResourcesError: The workers want more than there is.
    """
    given: dict[str, Any] = {"CPU": cpus, "GPU": gpus}
    for name, amount in (more or {}).items():
        if name not in given:
            raise ValueError(
                f"`resources_per_worker` must name resources of this machine, CPU or GPU, but got"
                f" {name!r}."
            )
        if given[name] not in (None, amount):
            raise ValueError(
                f"`resources_per_worker[{name!r}]` and `{_NAMES[name]}` must agree, but got"
                f" {amount!r} and {given[name]!r}. Hint: give one of them."
            )
        given[name] = amount
    for name, amount in given.items():
        if amount is not None and (
            isinstance(amount, bool) or not isinstance(amount, (int, float))
        ):
            raise TypeError(f"`{_NAMES[name]}` must be a number, but got {amount!r}.")
    cpus, gpus = given["CPU"], given["GPU"]
    if cpus is not None and (cpus < 1 or cpus != int(cpus)):
        raise ValueError(f"`cpus_per_worker` must be an integer of at least 1, but got {cpus!r}.")
    if gpus is not None and gpus < 0:
        raise ValueError(f"`gpus_per_worker` must be at least 0, but got {gpus!r}.")
    _check_available("CPU core(s)", "cpus_per_worker", num_workers, cpus or 0, num_cores)
    _check_available("GPU(s)", "gpus_per_worker", num_workers, gpus or 0, num_gpus)
    return None if cpus is None else int(cpus), gpus


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
