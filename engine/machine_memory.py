"""Memory that is left on this machine: the host's, as far as a container may use it, and that of NVIDIA's GPUs."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Limit and use of a container's memory: control groups of version 2, then of version 1."""
_RECLAIMABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
"""Parts of a memory node that programs can have, as vLLM counts them."""
_QUERY = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
_QUERY_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its number on this machine, its UUID, and its memory in bytes."""

    index: int
    uuid: str
    total: int
    free: int

    @property
    def name(self) -> str:
        """UUID, as ``CUDA_VISIBLE_DEVICES`` takes it: CUDA numbers GPUs by speed, the driver by their place."""
        return self.uuid


def available_memory(root: Path = _ROOT) -> int:
    """Return the host memory in bytes that programs can have now, within the container's limit if there is one.

    ``root`` is the folder that has ``proc`` and ``sys``.
    """
    meminfo = root / "proc/meminfo"
    found = _bytes_of(meminfo.read_text(), "MemAvailable") if meminfo.is_file() else None
    left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if found is None else found
    for limit, used in _CGROUPS:
        bound, taken = (_number(root / "sys/fs/cgroup" / name) for name in (limit, used))
        if bound is not None and taken is not None:
            return min(left, max(0, bound - taken))
    return left


def smallest_memory_node(root: Path = _ROOT) -> int | None:
    """Return the memory in bytes that programs can have of the memory node that has least; None where the kernel tells none."""
    nodes = [file.read_text() for file in (root / "sys/devices/system/node").glob("node[0-9]*/meminfo")]
    return min((sum(_bytes_of(node, part) or 0 for part in _RECLAIMABLE) for node in nodes), default=None)


def visible_gpus() -> list[Gpu]:
    """Return NVIDIA's GPUs that this process may use, in the driver's order; empty without the driver.

    ``CUDA_VISIBLE_DEVICES`` chooses and orders them, by number or UUID. Among unlike GPUs CUDA's own numbers may differ from the
    driver's: UUIDs there, or ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, name the same ones to both.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        told = subprocess.run([command, *_QUERY], capture_output=True, text=True, check=True, timeout=_QUERY_DEADLINE_S)
    except (OSError, subprocess.SubprocessError):
        return []
    found = [_gpu(line) for line in told.stdout.splitlines() if line.count(",") == 3]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return found
    names = [name.strip() for name in chosen.split(",")]
    return [gpu for name in names for gpu in found if name and (name == str(gpu.index) or gpu.uuid.startswith(name))]


def _gpu(line: str) -> Gpu:
    index, uuid, total, free = (part.strip() for part in line.split(","))
    return Gpu(int(index), uuid, int(total) * 2**20, int(free) * 2**20)


def _bytes_of(meminfo: str, name: str) -> int | None:
    found = re.search(rf"{re.escape(name)}:\s+(\d+) kB", meminfo)
    return int(found[1]) * 1024 if found else None


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None
