"""The one door to the accelerator. Everything else says `device` and means a CPU, CUDA, ROCm, XPU or plug-in device.

The only file of the package that may ask a device for its name, its memory or its clock (a test enforces it).
"""

import os
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bloomery.base.errors import Problem, RecipeError, host_memory_problem
from bloomery.base.units import format_bytes

# Some CPUs have no bf16 matrix units; torch says so with a page of C++ frames and then does the right thing.
warnings.filterwarnings("ignore", message="mkldnn_matmul failed")

_DRIVER = Path("/proc/driver/nvidia/version")
NO_SENSOR = "no sensor"


def pick_device(wanted: str | None = None) -> torch.device:
    """The device asked for, else this machine's accelerator, else the CPU."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted is None:
        return here or torch.device("cpu")
    if wanted == "cpu" or (here is not None and wanted.split(":")[0] == here.type):
        return torch.device(wanted)
    have = f"cpu and {here.type}" if here else "cpu"
    problem = Problem(f"--device is {wanted}", f"this machine has: {have}", "leave --device out, or name one of these")
    raise RecipeError(problem)


def device_of_rank(device: torch.device, local_rank: int, local_size: int) -> torch.device:
    """The device of one of several ranks on this machine, made the current one. Ranks may share a CPU, nothing else."""
    if device.type == "cpu":
        return device
    count = torch.accelerator.device_count()
    if local_size > count:
        what = f"{local_size} ranks were started on this machine, which has {count} devices of type {device.type}"
        raise RecipeError(Problem(what, "every rank needs its own", "start fewer, or use --device cpu"))
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device.type, local_rank)


def device_count(device: torch.device) -> int | None:
    """Devices of this kind here; None for a CPU, which any number of ranks may share."""
    return None if device.type == "cpu" else torch.accelerator.device_count()


def devices_here(device: torch.device) -> list[torch.device]:
    """All of this kind."""
    return [torch.device(device.type, index) for index in range(device_count(device) or 0)] or [device]


def device_name(device: torch.device) -> str:
    """What the maker calls it: `NVIDIA H200`; `cpu` for a CPU."""
    if device.type == "cpu":
        return "cpu"
    return str(_backend(device).get_device_name(device))


def device_total_bytes(device: torch.device) -> int:
    """Memory of the device; 0 for a CPU."""
    return 0 if device.type == "cpu" else int(_backend(device).get_device_properties(device).total_memory)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # sync


def device_cores(device: torch.device) -> int:
    """Processors that share the tiles of a matrix product, where the backend counts them."""
    if device.type == "cpu":
        return len(os.sched_getaffinity(0))
    return int(getattr(_backend(device).get_device_properties(device), "multi_processor_count", 128))


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(now, peak) bytes held on the device; on a CPU, of this process."""
    if device.type == "cpu":
        with open("/proc/self/statm") as statm:
            now = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)


def record_memory(device: torch.device) -> None:
    """Note from now on who allocates what (CUDA)."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000)


def write_memory(device: torch.device, path: Path) -> None:
    """What was noted, for pytorch.org/memory_viz, and stop noting."""
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)


def library_versions() -> dict[str, str]:
    """Of what lies between torch and NVIDIA's devices; empty where this torch is not made for them."""
    if torch.version.cuda is None:
        return {}
    driver = re.search(r"\d+\.\d[\d.]*", _DRIVER.read_text()) if _DRIVER.exists() else None
    nccl: Any = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ["none"]  # type: ignore[no-untyped-call]
    found = driver[0] if driver else "not loaded"
    return {"driver": found, "cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl))}


def clocks_mhz(device: torch.device) -> tuple[int, int] | None:
    """(now, at most) of an NVIDIA board; None where nothing tells."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        nvml, board = _board(device)
        kind = nvml.NVML_CLOCK_SM
        return nvml.nvmlDeviceGetClockInfo(board, kind), nvml.nvmlDeviceGetMaxClockInfo(board, kind)
    except Exception:  # without the package; on slices of a board (MIG); NVML's errors have no base outside of it
        return None


def read_boards(device: torch.device) -> list[tuple[float, float, float, float]]:
    """Of each NVIDIA board that this process sees: share of the last moments in which it was busy, bytes used, watts,
    degrees Celsius. None where nothing tells."""
    if device.type != "cuda" or torch.version.cuda is None:
        return []
    found = []
    for each in devices_here(device):
        try:
            nvml, board = _board(each)
            busy, used = nvml.nvmlDeviceGetUtilizationRates(board).gpu / 100, nvml.nvmlDeviceGetMemoryInfo(board).used
            watts = nvml.nvmlDeviceGetPowerUsage(board) / 1000
            found.append((busy, used, watts, nvml.nvmlDeviceGetTemperature(board, nvml.NVML_TEMPERATURE_GPU)))
        except Exception:  # as above
            continue
    return found


def is_fast_in_bf16(device: torch.device) -> bool:
    """CPUs are not, and GPUs before Ampere only emulate it."""
    if device.type == "cuda" and torch.version.cuda:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type != "cpu"


def lacks_fp8(device: torch.device) -> str:
    """Why it cannot multiply 8-bit floats; empty for one that can, and for a CPU, where they are emulated."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda" or not torch.version.cuda:
        return "8-bit products are written for NVIDIA devices"
    major, minor = torch.cuda.get_device_capability(device)
    return (
        "" if (major, minor) >= (8, 9) else f"8-bit matrix units begin with compute capability 8.9, not {major}.{minor}"
    )


def matmul_flops(
    device: torch.device,
    seconds: float = 0.2,
    dtype: torch.dtype | None = None,
    product: Callable[[Tensor, Tensor], object] = torch.matmul,
) -> float:
    """FLOPs per second of a product of two matrices, made again and again for so long. By default of a type at which
    every device is fast."""
    size, usual = (512, torch.float32) if device.type == "cpu" else (8192, torch.float16)
    matrix = torch.randn(size, size, device=device).to(dtype or usual)

    def multiply() -> None:
        product(matrix, matrix)
        synchronize(device)

    multiply()  # the first one loads the kernel
    count, began = 0, time.monotonic()
    while (spent := time.monotonic() - began) < seconds:
        multiply()
        count += 1
    return count * 2 * size**3 / spent


def available_host_bytes(meminfo: str = "/proc/meminfo") -> int:
    """Bytes that a process can still take here, with the page cache, which is given back when asked for."""
    with open(meminfo) as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


class Sensor(NamedTuple):
    """What counts the energy of one device. How a run adds it up is in monitor/meters.py."""

    name: str
    joules: Callable[[], float]
    """Counted since some beginning; never falls. OSError if it cannot be read."""


def nvml_sensor(nvml: Any, handle: Any) -> Sensor:
    """The total energy counter of one NVIDIA board, since its driver was loaded."""

    def joules() -> float:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    return Sensor("NVML", joules)


def energy_sensor(device: torch.device) -> Sensor | str:
    """What counts the energy of this device, or why nothing does. Of CPUs `monitor.carbon` has an estimate."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{NO_SENSOR} is known for {device_name(device)}"
    try:
        sensor = nvml_sensor(*_board(device))
        sensor.joules()
    except ImportError:
        return f"{NO_SENSOR} can be read without the package nvidia-ml-py: `pip install bloomery[energy]`"
    except OSError as error:  # boards before Volta, and slices of a board (MIG)
        return f"{NO_SENSOR} that answers: {error}"
    return sensor


def _board(device: torch.device) -> tuple[Any, Any]:
    """NVML and its handle of a device. ImportError without the package, OSError where it does not answer."""
    import pynvml  # type: ignore[import-untyped,import-not-found,unused-ignore]

    try:
        pynvml.nvmlInit()
        # By its identity: NVML's numbers know nothing of CUDA_VISIBLE_DEVICES.
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{_backend(device).get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error


def host_memory(size: int, device: torch.device) -> Tensor:
    """Bytes on the host that the device can copy into without the processor; the system cannot page them out. All of
    them are really there: the first use is as fast as the next. For a device that takes 0.3 s a GB."""
    is_pinned = device.type != "cpu"
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
    return memory if is_pinned else memory.zero_()


class CopyQueue:
    """Copies from the device to the host that run beside its computation. On a CPU they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._done: torch.Event | None = None

    @contextmanager
    def after_all_so_far(self) -> Iterator[None]:
        """Copies (`non_blocking=True`) within begin when the work queued so far is done, and hold nothing up."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield
            self._done = torch.Event(self._device)
            self._done.record(self._stream)

    def hold_back(self) -> None:
        """Let what is queued on the device from now on wait for the copies. Does not wait itself."""
        if self._done is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        """Until the copies have arrived on the host."""
        if self._done is not None:
            self._done.synchronize()


def out_of_memory_problem(error: BaseException, device: torch.device) -> Problem | None:
    """For a training that does not fit the device or the host; None if the error is another one."""
    is_librarys = isinstance(error, RuntimeError) and "_STATUS_ALLOC_FAILED" in str(error)  # cuBLAS, cuDNN
    if not (isinstance(error, torch.OutOfMemoryError) or is_librarys):
        return host_memory_problem(error)
    total = device_total_bytes(device)
    size = f" of {format_bytes(total)}" if total else ""
    peak = format_bytes(memory_bytes(device)[1])
    remedy = "use a smaller batch.micro_batch_size, parallel.recompute=full, or a smaller model"
    return Problem(f"{device_name(device)} ran out of memory at {peak}{size}", remedy=remedy)


def _backend(device: torch.device) -> Any:
    return torch.get_device_module(device)
