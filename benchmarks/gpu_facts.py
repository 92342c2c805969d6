"""Part of `gpu.py`: what the machine is, and how fast it copies and multiplies."""

import os
import shutil
import tempfile
import time

import torch
from gpu_machine import copy_bytes_per_s, listed_gpus, part_arguments
from gpu_record import leave_out, tell

_COPIED_BYTES = {"cuda": 2 * 10**9, "cpu": 5 * 10**7}
_MATRIX_SIZE = {"cuda": 8192, "cpu": 256}
_NUM_PRODUCTS = 10


def main() -> None:
    """Tell all of it."""
    device = part_arguments(__doc__).parse_args().device
    tell("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    if device == "cuda":
        tell_of_gpus()
    else:
        leave_out("the GPU", "there is none, or --device cpu was given")
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    free_gb = shutil.disk_usage(tempfile.gettempdir()).free / 1e9
    cores = f"{len(os.sched_getaffinity(0))} cores"
    tell("host", f"{cores}, {memory_gb:.0f} GB of memory, {free_gb:.0f} GB of disk free")
    tell_bandwidths(device)
    tell_of_products(device)
    tell_disk_rate(device)


def tell_of_gpus() -> None:
    """Tell what torch and nvidia-smi say of each GPU."""
    for index in range(torch.cuda.device_count()):
        known = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        tell(
            f"cuda:{index}, as torch sees it",
            known.name,
            f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free; capability"
            f" {known.major}.{known.minor}; {known.multi_processor_count} multiprocessors;"
            f" {known.uuid}",
        )
    gpus = listed_gpus()
    if gpus is None:
        leave_out("what nvidia-smi says", "it is not there, or fails")
    for gpu in gpus or ():
        tell(
            f"GPU {gpu.index}, as nvidia-smi sees it",
            gpu.name,
            f"{gpu.total_mib:.0f} MiB, {gpu.used_mib:.0f} used; driver {gpu.driver}; {gpu.uuid}",
        )


def tell_bandwidths(device: str) -> None:
    """Tell how fast memory is copied; that from a GPU to pinned memory limits checkpoints."""
    num_values = _COPIED_BYTES[device] // 4
    ways = {"host to host": (torch.ones(num_values), torch.ones(num_values))}
    if device == "cuda":
        on_device = torch.ones(num_values, device="cuda")
        pinned = torch.ones(num_values).pin_memory()
        ways = {
            "device to host, pinned": (on_device, pinned),
            "host to device, pinned": (pinned, on_device),
            "device to host, pageable": (on_device, torch.ones(num_values)),
            "device to device": (on_device, torch.empty_like(on_device)),
            **ways,
        }
    for name, (source, target) in ways.items():
        rates = sorted(copy_bytes_per_s(source, target))
        spread = f"{rates[0] / 1e9:.1f} to {rates[-1] / 1e9:.1f}"
        tell(f"copy, {name}", f"{rates[len(rates) // 2] / 1e9:.1f} GB/s", spread, raw=rates)


def tell_of_products(device: str) -> None:
    """Tell how fast matrices are multiplied in bfloat16."""
    size = _MATRIX_SIZE[device]
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        matrix @ matrix
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_NUM_PRODUCTS):
        matrix @ matrix
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / _NUM_PRODUCTS
    tell(f"product of matrices of {size}, bf16", f"{2 * size**3 / seconds / 1e12:.2f} TFLOP/s")


def tell_disk_rate(device: str) -> None:
    """Tell how fast a file is written, to the cache of the system and to the disk."""
    block = os.urandom(10**6) * 50
    num_blocks = 20 if device == "cuda" else 1
    with tempfile.TemporaryFile() as file:
        begin = time.perf_counter()
        for _ in range(num_blocks):
            file.write(block)
        file.flush()
        written = time.perf_counter() - begin
        os.fsync(file.fileno())
        stored = time.perf_counter() - begin
    num_bytes = num_blocks * len(block)
    tell(
        "writing a file",
        f"{num_bytes / written / 1e9:.2f} GB/s",
        f"{num_bytes / stored / 1e9:.2f} GB/s until it is on the disk",
    )


if __name__ == "__main__":
    main()
