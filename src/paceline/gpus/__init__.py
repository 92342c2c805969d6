"""The GPUs of this machine: which there are, and which this process may use."""

from paceline.gpus._known_gpu import KnownGpu
from paceline.gpus._nvml import Nvml, NvmlDevice
from paceline.gpus._visible_gpus import (
    CUDA_VARIABLE,
    gpus_of_machine,
    names_in_variable,
    num_visible_gpus,
    visible_gpus,
)

__all__ = [
    "CUDA_VARIABLE",
    "KnownGpu",
    "Nvml",
    "NvmlDevice",
    "gpus_of_machine",
    "names_in_variable",
    "num_visible_gpus",
    "visible_gpus",
]
