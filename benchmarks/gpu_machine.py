"""What the parts of `gpu.py` need to know of the machine."""

import argparse
import shutil
import subprocess
import time
from dataclasses import dataclass

import torch

_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version"
_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as nvidia-smi tells of it; memory is in MiB."""

    index: str
    uuid: str
    name: str
    total_mib: float
    used_mib: float
    driver: str


def part_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what `gpu.py` tells every part."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long it may take")
    return parser


def listed_gpus() -> list[Gpu] | None:
    """Return what nvidia-smi lists; None without it, or if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return None if done.returncode else parsed_gpus(done.stdout)


def parsed_gpus(text: str) -> list[Gpu]:
    """Return the GPUs of nvidia-smi's lines; values that it does not know are NaN."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(_FIELDS.split(",")):
            index, uuid, name, total, used, driver = cells
            gpus.append(
                Gpu(
                    index=index,
                    uuid=uuid,
                    name=name,
                    total_mib=_number(total),
                    used_mib=_number(used),
                    driver=driver,
                )
            )
    return gpus


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def copy_bytes_per_s(
    source: torch.Tensor, target: torch.Tensor, num_rounds: int = 5
) -> list[float]:
    """Return the bandwidth of copying one flat tensor, once both were used before."""
    rates = []
    for index in range(num_rounds + 2):
        _wait(source, target)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait(source, target)
        if index > 1:
            rates.append(source.nbytes / (time.perf_counter() - begin))
    return rates


def _wait(*tensors: torch.Tensor) -> None:
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
