"""The slots of this machine."""

import os
import shutil
import subprocess


def find_devices(num_slots: int | None) -> list[str]:
    """Return one entry per slot: a GPU's id, else "cpu" per core; `num_slots` sets their number.

    Raises:
        ValueError: `num_slots` is less than 1, or more than the GPUs there are.
    """
    if num_slots is not None and num_slots < 1:
        raise ValueError(f"`num_slots` must be at least 1, but got {num_slots}.")
    gpus = _gpu_ids()
    if gpus:
        if num_slots is not None and num_slots > len(gpus):
            raise ValueError(
                f"`num_slots` must be at most {len(gpus)}, the number of GPUs, but got {num_slots}."
                " Hint: hide the GPUs by CUDA_VISIBLE_DEVICES= to have one slot per CPU core."
            )
        return gpus[:num_slots]
    if num_slots is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        num_slots = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return ["cpu"] * num_slots


def _gpu_ids() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [entry.strip() for entry in visible.split(",") if entry.strip() not in ("", "-1")]
    return query_gpus("index")


def query_gpus(field: str) -> list[str]:
    """Return a field of `nvidia-smi` for each GPU; an empty list where it tells of none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        listed = subprocess.run(
            [program, f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.splitlines() if line.strip()]
