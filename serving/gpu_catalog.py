"""GPU types: memory, bandwidth, architecture; found by name or by what the driver says. Pure.

Memory is what the driver reports as the card's total (`nvidia-smi`), bandwidth is the data sheet's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from serving.errors import ConfigError

MIB = 1 << 20
SAME_MEMORY = 0.04  # drivers differ by so much in what they keep for themselves (ECC, firmware)


class Architecture(str, Enum):
    """By compute capability; what quantisation a GPU can do follows from it (serving.quantization)."""

    AMPERE = "Ampere"  # 8.0, 8.6
    ADA = "Ada"  # 8.9
    HOPPER = "Hopper"  # 9.0
    BLACKWELL = "Blackwell"  # 10.0, 10.3
    BLACKWELL_RTX = "Blackwell RTX"  # 12.0


@dataclass(frozen=True, slots=True)
class GpuType:
    name: str
    memory_bytes: int
    bandwidth_gb_s: int  # of its memory, 10**9 bytes a second
    architecture: Architecture
    pattern: str  # found in the driver's name for the card


def _gpu(name: str, mib: int, bandwidth_gb_s: int, architecture: Architecture, pattern: str) -> GpuType:
    return GpuType(name, mib * MIB, bandwidth_gb_s, architecture, pattern)


CATALOG = (
    _gpu("A10", 23_028, 600, Architecture.AMPERE, r"\bA10G?\b"),
    _gpu("A30", 24_576, 933, Architecture.AMPERE, r"\bA30\b"),
    _gpu("A40", 46_068, 696, Architecture.AMPERE, r"\bA40\b"),
    _gpu("A100-40", 40_960, 1_555, Architecture.AMPERE, r"\bA100\b"),
    _gpu("A100-80", 81_920, 2_039, Architecture.AMPERE, r"\bA100\b"),
    _gpu("L4", 23_034, 300, Architecture.ADA, r"\bL4\b"),
    _gpu("L40S", 46_068, 864, Architecture.ADA, r"\bL40S\b"),
    _gpu("H20-96", 97_871, 4_000, Architecture.HOPPER, r"\bH20\b"),
    _gpu("H100-80", 81_559, 3_350, Architecture.HOPPER, r"\bH100\b"),
    _gpu("H100-94", 95_830, 3_938, Architecture.HOPPER, r"\bH100\b"),
    _gpu("H200-141", 143_771, 4_800, Architecture.HOPPER, r"\bH200\b"),
    _gpu("GH200-96", 97_871, 4_000, Architecture.HOPPER, r"\bGH200\b"),
    _gpu("B200", 183_359, 7_700, Architecture.BLACKWELL, r"\bB200\b"),
    _gpu("B300", 275_040, 7_750, Architecture.BLACKWELL, r"\bB300\b"),
    _gpu("GB200", 189_471, 8_000, Architecture.BLACKWELL, r"\bGB200\b"),
    _gpu("RTX-PRO-6000", 97_887, 1_792, Architecture.BLACKWELL_RTX, r"\bRTX PRO 6000\b"),
)


def find_gpu(name: str, what: str = "--gpu") -> GpuType:
    """By its name here, or by the part before the memory where that is enough (`H200`, not `A100`).

    Raises ConfigError, which says that `what` has this value and what is known.
    """
    wanted = name.upper().removeprefix("NVIDIA").strip(" -_").replace("_", "-")
    exact = [gpu for gpu in CATALOG if gpu.name == wanted]
    families = [gpu for gpu in CATALOG if re.sub(r"-\d+$", "", gpu.name) == wanted]
    found = exact or families
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(gpu.name for gpu in found)
        raise ConfigError(f"{what} = {name!r}: which one? {names}")
    known = ", ".join(gpu.name for gpu in CATALOG)
    raise ConfigError(f"{what} = {name!r}: no such GPU; known: {known}")


def identify(device_name: str, memory_bytes: int) -> GpuType | None:
    """The type of a card as the driver names it; None when it is none of the catalogue."""
    for gpu in CATALOG:
        near = abs(memory_bytes - gpu.memory_bytes) <= SAME_MEMORY * gpu.memory_bytes
        if near and re.search(gpu.pattern, device_name):
            return gpu
    return None
