"""The reader of NVML, NVIDIA's library for its GPUs, by the optional package `nvidia-ml-py`.

As a program it prints what NVML tells of all GPUs: a driver that hangs then hangs a process that
others need not wait for.
"""

import json
import sys
from typing import Any

NO_DRIVER = 3
"""The exit code of the program where there is no driver of NVIDIA, or no library of it."""


class Nvml:
    """NVML, open until `close`.

    Args:
        problems: Gets a sentence for each GPU that NVML counts but cannot tell of.

    Raises:
        ImportError: `nvidia-ml-py` is not installed.
        Exception: There is no library, no driver, or they fail.
    """

    def __init__(self, problems: list[str] | None = None) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self.gpus: list[NvmlDevice] = []
        for number in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                self.gpus.append(NvmlDevice(pynvml, handle, number))
            except Exception as error:
                # One that has fallen off the bus, or that this user may not open.
                if problems is not None:
                    why = str(error).rstrip(".")
                    problems.append(f"GPU {number} cannot be used: {why}.")

    def close(self) -> None:
        """Give the library up.

        Raises:
            Exception: The library fails.
        """
        self.gpus = []
        self._nvml.nvmlShutdown()


class NvmlDevice:
    """A GPU, or a MIG device of one; `number` is that of the GPU, as nvidia-smi counts.

    What the device does not support raises an exception of `pynvml`.
    """

    def __init__(self, nvml: Any, handle: Any, number: int) -> None:
        self._nvml = nvml
        self._handle = handle
        self.number = number
        self.uuid = _text_of_nvml(nvml.nvmlDeviceGetUUID(handle))

    def name(self) -> str:
        """Return the name of the product; that of a MIG device ends in `MIG` and its profile."""
        return _text_of_nvml(self._nvml.nvmlDeviceGetName(self._handle))

    def memory_bytes(self) -> tuple[int, int]:
        """Return the memory in use, and all of it."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(memory.used), int(memory.total)

    def use_percent(self) -> float:
        """Return for how much of the last moment the GPU has computed."""
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)

    def power_w(self) -> float:
        """Return the power that it draws."""
        # NVML tells milliwatts.
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000

    def mig_devices(self) -> "list[NvmlDevice] | None":
        """Return the devices that the GPU is divided into; None if MIG is off."""
        nvml = self._nvml
        try:
            is_on = bool(nvml.nvmlDeviceGetMigMode(self._handle)[0])
        except nvml.NVMLError:
            return None  # Most kinds of GPU have no MIG.
        if not is_on:
            return None
        devices = []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(self._handle)):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, index)
            except nvml.NVMLError:
                continue  # Numbers that no device has, or one that is not for this user.
            devices.append(NvmlDevice(nvml, handle, self.number))
        return devices


def main() -> None:
    """Print the GPUs as a line of JSON; exit with `NO_DRIVER` where there is nothing to ask."""
    import pynvml

    problems: list[str] = []
    try:
        nvml = Nvml(problems)
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        sys.exit(NO_DRIVER)
    except pynvml.NVMLError as error:
        sys.exit(f"{error}")
    found = []
    for gpu in nvml.gpus:
        parts = gpu.mig_devices()
        if parts is not None and not parts:
            problems.append(f"GPU {gpu.number} has MIG turned on, but no MIG devices.")
        found += [
            {
                "number": device.number,
                "uuid": device.uuid,
                "name": _name_or_nothing(device),
                "memory_bytes": _memory_or_nothing(device),
                "is_mig": parts is not None,
            }
            for device in ([gpu] if parts is None else parts)
        ]
    # The library may print something itself: the last line counts.
    print("\n" + json.dumps({"gpus": found, "problems": problems}), flush=True)


def _name_or_nothing(device: NvmlDevice) -> str:
    try:
        return device.name()
    except Exception:
        return ""


def _memory_or_nothing(device: NvmlDevice) -> int:
    try:
        return device.memory_bytes()[1]
    except Exception:
        # GPUs that share the memory of the machine tell of none.
        return 0


def _text_of_nvml(value: Any) -> str:
    """Return text that older releases of pynvml give as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
