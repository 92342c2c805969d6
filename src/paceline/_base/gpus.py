"""GPUs of this machine, by NVML, nvidia-smi or amd-smi, and the GPUs of this process."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

# A program may hang for ever in a driver that is in trouble.
_LIMIT_S = 20.0
# A process that hangs in a driver may not end even when it is killed.
_KILL_S = 2.0


def run_gpu_program(name: str, *arguments: str) -> str:
    """Return the output of a program; empty if the program is missing, fails or hangs."""
    program = shutil.which(name)
    if program is None:
        return ""
    try:
        return ask_gpu_program([program, *arguments], name)
    except subprocess.TimeoutExpired:
        pass  # logged already
    except subprocess.CalledProcessError as error:
        told = f"{error.stderr}\n{error.output}".split("\n")
        why = next((line.strip() for line in told if line.strip()), "nothing was said")
        code = error.returncode
        logger.warning("%s does not tell of the GPUs: it ended with %d: %s", name, code, why)
    except OSError as error:
        logger.warning("%s does not tell of the GPUs: %s", name, error)
    return ""


def ask_gpu_program(
    command: list[str],
    what: str | None,
    *,
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return the output of a command.

    Args:
        command: The program and its arguments.
        what: The question, for the log; None for no log.
        limit_s: Seconds that it may take; the limit for all programs of GPUs by default.
        environment: Its environment; that of this process by default.

    Raises:
        OSError: It cannot be started.
        subprocess.CalledProcessError: It failed.
        subprocess.TimeoutExpired: It took too long, and was killed.
    """
    limit_s = _LIMIT_S if limit_s is None else limit_s
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    )
    try:
        output, complaint = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        if what is not None:
            logger.warning("%s does not tell of the GPUs: no answer for %g s.", what, limit_s)
        raise
    finally:
        _end_process(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, complaint)
    return output


def _end_process(process: "subprocess.Popen[str]") -> None:
    """End a process and give its pipes up, in bounded time."""
    process.kill()
    # A process stuck in the driver ignores even SIGKILL for a while.
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGpu:
    """A GPU or a MIG device.

    Attributes:
        id: Its value in CUDA_VISIBLE_DEVICES: a number or a UUID.
        uuid: Its UUID; empty if unknown.
        name: The product name and the MIG profile; the names of all GPUs if it may be any of
            them; empty if unknown.
        memory_bytes: Its whole memory; 0 if unknown.
        is_mig: Whether it is a MIG device.
        number: Its number as nvidia-smi counts, or the number of its GPU for a MIG device; empty if
            unknown.
    """

    id: str
    uuid: str = ""
    name: str = ""
    memory_bytes: int = 0
    is_mig: bool = False
    number: str = ""

    def with_id(self, id: str) -> "KnownGpu":
        """Return the same GPU under another id."""
        return replace(self, id=id)

    def is_called(self, name: str) -> bool:
        """Return whether a name in CUDA_VISIBLE_DEVICES (number or UUID) means this GPU."""
        # The beginning of a UUID is enough for CUDA.
        if name.isdecimal():
            return name == self.id or (name == self.number and not self.is_mig)
        return name == self.id or self.uuid.startswith(name)


_MEBIBYTES = {"MB": 1, "MiB": 1, "GB": 1024, "GiB": 1024}


def amd_gpus() -> list[KnownGpu]:
    """Return the GPUs of AMD in the order of amd-smi."""
    listed = [one for one in _query_amd("list") if "gpu" in one]
    if not listed:
        return []
    # Separate queries: a release without support for one option still answers the other query.
    names = {one.get("gpu"): _name(one.get("asic")) for one in _query_amd("static", "--asic")}
    sizes = {one.get("gpu"): _size(one.get("vram")) for one in _query_amd("static", "--vram")}
    return [
        KnownGpu(
            # HIP may number the GPU differently from amd-smi.
            id=str(one.get("hip_id", one["gpu"])),
            uuid=str(one.get("uuid", "")),
            name=names.get(one["gpu"], ""),
            memory_bytes=sizes.get(one["gpu"], 0),
        )
        for one in listed
    ]


def _name(asic: Any) -> str:
    return str(asic.get("market_name") or "") if isinstance(asic, dict) else ""


def _size(vram: Any) -> int:
    """Return bytes: amd-smi prints `{"value": 196592, "unit": "MB"}`, or a text in old releases.

    Its MB are of 1,048,576 bytes.
    """
    size = vram.get("size") if isinstance(vram, dict) else vram
    text = f"{size.get('value')} {size.get('unit')}" if isinstance(size, dict) else str(size)
    match = re.fullmatch(r"(\d+) (\w+)", text)
    return int(match[1]) * _MEBIBYTES.get(match[2], 0) << 20 if match else 0


def _query_amd(*arguments: str) -> list[dict[str, Any]]:
    """Return the facts of each GPU from `amd-smi`; an empty list without an answer."""
    try:
        told = json.loads(run_gpu_program("amd-smi", *arguments, "--json") or "[]")
    except ValueError:
        return []
    # ROCm 7 and later: some commands wrap the list in an object.
    listed = told.get("gpu_data", []) if isinstance(told, dict) else told
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


NO_DRIVER = 3
"""The exit code of nvidia-smi if the NVIDIA driver or its library is missing."""


class Nvml:
    """NVML, open until `close`.

    Args:
        problems: Gets a sentence for each GPU that NVML counts but cannot describe.

    Raises:
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
                # GPU fallen off the bus, or closed to this user.
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
    """GPU, or MIG device of a GPU; `number` is the GPU's number in nvidia-smi.

    A query that the device does not support raises an exception of `pynvml`.
    """

    def __init__(self, nvml: Any, handle: Any, number: int) -> None:
        self._nvml = nvml
        self._handle = handle
        self.number = number
        self.uuid = _nvml_text(nvml.nvmlDeviceGetUUID(handle))

    def name(self) -> str:
        """Return the product name; for a MIG device the name ends in `MIG` and the profile."""
        return _nvml_text(self._nvml.nvmlDeviceGetName(self._handle))

    def memory_bytes(self) -> tuple[int, int]:
        """Return the memory in use and the total memory, in bytes."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(memory.used), int(memory.total)

    def use_percent(self) -> float:
        """Return for how much of the last moment the GPU has computed."""
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)

    def power_w(self) -> float:
        """Return the power draw in watts."""
        # NVML reports milliwatts.
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000

    def mig_devices(self) -> "list[NvmlDevice] | None":
        """Return the MIG devices of the GPU; None if MIG is off."""
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
    # A GPU without a readable name is usable all the same.
    except Exception:
        return ""


def _memory_or_nothing(device: NvmlDevice) -> int:
    try:
        return device.memory_bytes()[1]
    except Exception:
        # GPUs that share the machine's memory report none of their own.
        return 0


def _nvml_text(value: Any) -> str:
    """Return NVML's text as str: older releases of pynvml give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


_GPU_LINE = re.compile(r"GPU (?P<number>\d+): (?P<name>.+) \(UUID: (?P<uuid>GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")
# Linux has one of them while a driver is loaded, or the Linux inside of Windows its own.
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
_FIELDS = ("index", "uuid", "name", "memory.total")
# Module path of this process for the child: both find the same pynvml.
_NVML_PROGRAM = """
import sys
sys.path[:] = sys.argv.pop(1).split(":")
from paceline._base.gpus import main
main()
"""


def nvidia_gpus() -> list[KnownGpu]:
    """Return the NVIDIA GPUs in order; each MIG device of a divided GPU counts separately.

    The id is the number for nvidia-smi. If any GPU is divided it is the UUID, as MIG devices have
    no numbers, and numbers and UUIDs cannot be mixed.
    """
    gpus = _gpus_by_nvml()
    if gpus is None:
        gpus = _gpus_by_nvidia_smi()
    if any(gpu.is_mig for gpu in gpus):
        return [gpu.with_id(gpu.uuid) for gpu in gpus]
    return gpus


def _gpus_by_nvml() -> list[KnownGpu] | None:
    """Return the GPUs reported by NVML; None if NVML cannot be asked.

    Another process asks, as a driver may hang in a call that nothing ends. This takes 0.1 s, and is
    left out on a machine without a driver.
    """
    if not any(map(os.path.exists, _DRIVER_FILES)):
        return None
    command = [sys.executable, "-c", _NVML_PROGRAM, os.pathsep.join(sys.path)]
    try:
        told = json.loads(ask_gpu_program(command, "NVML").splitlines()[-1])
    except subprocess.CalledProcessError as error:
        if error.returncode != NO_DRIVER:
            lines = [line for line in str(error.stderr).splitlines() if line.strip()]
            why = lines[-1] if lines else f"exit code {error.returncode}"
            logger.warning("NVML does not tell of the GPUs: %s", why)
        return None
    except subprocess.TimeoutExpired:
        return None
    except (OSError, ValueError, IndexError) as error:
        logger.warning("NVML does not tell of the GPUs: %s", error)
        return None
    problems = told["problems"]
    for problem in problems:
        logger.warning("%s", problem)
    return [
        KnownGpu(
            # CUDA may not count a GPU that cannot be used, which changes the numbers.
            id=one["uuid"] if problems else str(one["number"]),
            uuid=one["uuid"],
            name=one["name"],
            memory_bytes=one["memory_bytes"],
            is_mig=one["is_mig"],
            number=str(one["number"]),
        )
        for one in told["gpus"]
    ]


def _gpus_by_nvidia_smi() -> list[KnownGpu]:
    listed = run_gpu_program("nvidia-smi", "--list-gpus")
    if not listed:
        return []
    rows = _nvidia_smi_rows()
    divided = _listing_gpus(listed, {gpu.uuid: gpu for gpu in rows})
    return divided if not rows or any(gpu.is_mig for gpu in divided) else rows


def _nvidia_smi_rows() -> list[KnownGpu]:
    table = run_gpu_program(
        "nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"
    )
    gpus = []
    for line in table.splitlines():
        row = dict(zip(_FIELDS, (cell.strip() for cell in line.split(",")), strict=False))
        if row.get("index"):
            mebibytes = row.get("memory.total", "")
            gpus.append(
                KnownGpu(
                    id=row["index"],
                    number=row["index"],
                    uuid=row.get("uuid", ""),
                    name=row.get("name", ""),
                    # GPUs that share the machine's memory report none of their own.
                    memory_bytes=int(mebibytes) << 20 if mebibytes.isdecimal() else 0,
                )
            )
    return gpus


def _listing_gpus(listed: str, rows: dict[str, KnownGpu]) -> list[KnownGpu]:
    """Return each MIG device of a listing, and each GPU without MIG devices.

    The listing has no memory sizes; those of whole GPUs are in the rows, by their UUIDs.
    """
    found: list[KnownGpu] = []
    whole: KnownGpu | None = None
    for line in listed.splitlines():
        if match := _GPU_LINE.match(line):
            plain = KnownGpu(
                id=match["number"], number=match["number"], uuid=match["uuid"], name=match["name"]
            )
            whole = rows.get(match["uuid"], plain)
            found.append(whole)
        elif (match := _MIG_LINE.match(line)) and whole is not None:
            if found[-1] is whole:
                found.pop()
            found.append(
                KnownGpu(
                    id=whole.id,
                    number=whole.number,
                    uuid=match["uuid"],
                    name=f"{whole.name} MIG {match['profile']}",
                    is_mig=True,
                )
            )
    return found


CUDA_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"

# GPUs of the machine, cached only when found: a driver slow at first may answer a later query.
_found: list[KnownGpu] = []


def machine_gpus() -> list[KnownGpu]:
    """Return all GPUs of this machine; each MIG device of a divided GPU counts separately."""
    return nvidia_gpus() or amd_gpus()


def visible_gpus() -> list[KnownGpu]:
    """Return the GPUs left visible by CUDA_VISIBLE_DEVICES, a variable known to ROCm too."""
    visible = names_in_variable()
    if visible == []:
        return []
    gpus = nvidia_gpus()
    if not gpus:
        gpus = amd_gpus()
        if visible is None:
            visible = names_in_variable("HIP_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return [_gpu_named(name, gpus) for name in visible]


def num_visible_gpus() -> int:
    """Return the number of GPUs usable by this process; torch counts them if loaded.

    CUDA gives a process one MIG device at most, unless the variable names several.
    """
    # Asked only if the script has imported torch: the import would take seconds.
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.cuda.device_count())
    visible = names_in_variable()
    if visible == []:
        return 0
    number = _num_usable_gpus()
    return number if visible is None else min(len(visible), number)


def names_in_variable(variable: str = CUDA_VARIABLE) -> list[str] | None:
    """Return the GPUs named by a variable, by number or UUID; None if not set.

    GPUs behind an entry without a GPU, such as -1, are hidden.
    """
    value = os.environ.get(variable)
    if value is None:
        return None
    names = (name.strip() for name in value.split(","))
    return [*takewhile(lambda name: name and not name.startswith("-"), names)]


def _num_usable_gpus() -> int:
    """Return the most GPUs CUDA_VISIBLE_DEVICES may name, or CUDA's number if not set."""
    if not _found:
        # Driver files as the last source: in some containers no program reports the GPUs.
        _found.extend(machine_gpus() or _gpus_by_device_files())
    if names_in_variable() is not None:
        return len(_found)
    if any(gpu.is_mig for gpu in _found):
        return 1
    hip = names_in_variable("HIP_VISIBLE_DEVICES")
    # Numbers are NVIDIA's.
    is_amd = not any(gpu.number for gpu in _found)
    return len(_found) if hip is None or not is_amd else min(len(hip), len(_found))


def _gpus_by_device_files() -> list[KnownGpu]:
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*"))
    return [KnownGpu(id=one, number=one) for one in sorted(numbers) if one.isdecimal()]


def _gpu_named(name: str, gpus: list[KnownGpu]) -> KnownGpu:
    """Return the GPU of a name; for an ambiguous name, only the facts common to all GPUs."""
    # CUDA counts the fastest GPU first unless a variable makes it count as nvidia-smi does.
    is_certain = not name.isdecimal() or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    found = [gpu for gpu in gpus if is_certain and gpu.is_called(name)]
    if len(found) == 1:
        return found[0].with_id(name)
    names, sizes = {gpu.name for gpu in gpus}, {gpu.memory_bytes for gpu in gpus}
    return KnownGpu(
        id=name,
        name=", ".join(sorted(names - {""})),
        memory_bytes=sizes.pop() if len(sizes) == 1 else 0,
    )
