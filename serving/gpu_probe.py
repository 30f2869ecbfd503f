"""What GPUs this process may use, asked of the CUDA driver itself: no torch, no context, no tool to call.

`CUDA_VISIBLE_DEVICES`, which Ray sets for each worker, holds here as it does for the engine.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

NAME_BYTES = 256
DRIVER_FILE = Path("/proc/driver/nvidia/version")  # there with the kernel's driver, whoever may use a GPU


@dataclass(frozen=True, slots=True)
class Device:
    name: str  # as the driver says it: "NVIDIA H200"
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class GpuState:
    """All None and empty on a machine without a driver."""

    devices: tuple[Device, ...] = ()
    cuda: str | None = None  # the newest CUDA that the driver speaks: "13.0"
    driver: str | None = None  # "580.95.05"


def probe(library: str = "libcuda.so.1", driver_file: Path = DRIVER_FILE) -> GpuState:
    """Never raises: what cannot be asked is not there."""
    driver = _driver_version(driver_file)
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return GpuState(driver=driver)
    if cuda.cuInit(0) != 0:
        return GpuState(driver=driver)
    number = ctypes.c_int()
    version = None
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if cuda.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return GpuState(cuda=version, driver=driver)
    devices = []
    for index in range(number.value):
        device = ctypes.c_int()
        name = ctypes.create_string_buffer(NAME_BYTES)
        memory = ctypes.c_size_t()
        if (
            cuda.cuDeviceGet(ctypes.byref(device), index) == 0
            and cuda.cuDeviceGetName(name, NAME_BYTES, device) == 0
            and cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0
        ):
            devices.append(Device(name.value.decode(errors="replace"), memory.value))
    return GpuState(tuple(devices), version, driver)


def _driver_version(file: Path) -> str | None:
    """`NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release ...`"""
    try:
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", file.read_text())
    except OSError:
        return None
    return found[1] if found else None
