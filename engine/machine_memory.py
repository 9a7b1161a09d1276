"""Memory that is left on this machine: the host's, as far as a container may use it, and that of NVIDIA's GPUs."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import EngineFailure, InvalidRequest

_ROOT = Path("/")
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)
"""Limit, use and parts of a container's memory, and what stands before a part's name: control groups of version 2, then 1."""
_CACHED = ("active_file", "inactive_file")
"""Parts of a container's use that are copies of files: the kernel gives them to programs that ask."""
_RECLAIMABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
"""Parts of a memory node that programs can have, as vLLM counts them."""
_QUERY = ("--query-gpu=index,uuid,mig.mode.current,memory.total,memory.free", "--format=csv,noheader,nounits")
_QUERY_DEADLINE_S = 30.0
_CONTROL = "dev/nvidiactl"
_MIG = "MIG-"
"""Beginning of the UUID of a slice of a GPU, and of the older names of slices."""
_WAY = (
    "so weft cannot give a vLLM server a part of it, and vLLM by itself takes nearly all: set --gpu-memory-utilization in "
    'WEFT_VLLM_ARGUMENTS, as \'["--gpu-memory-utilization","0.45"]\''
)


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
    for limit, used, parts, prefix in _CGROUPS:
        bound, taken = (_number(root / "sys/fs/cgroup" / name) for name in (limit, used))
        if bound is not None and taken is not None:
            cached = _cached(root / "sys/fs/cgroup" / parts, prefix)
            return min(left, max(0, bound - max(0, taken - cached)))
    return left


def smallest_memory_node(root: Path = _ROOT) -> int | None:
    """Return the memory in bytes that programs can have of the memory node that has least; None where the kernel tells none."""
    nodes = [file.read_text() for file in (root / "sys/devices/system/node").glob("node[0-9]*/meminfo")]
    return min((sum(_bytes_of(node, part) or 0 for part in _RECLAIMABLE) for node in nodes), default=None)


def visible_gpus(root: Path = _ROOT) -> list[Gpu]:
    """Return NVIDIA's GPUs that this process may use, in the driver's order; empty without the driver.

    ``CUDA_VISIBLE_DEVICES`` chooses and orders them, by number or UUID. Among unlike GPUs CUDA's own numbers may differ from the
    driver's: UUIDs there, or ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, name the same ones to both. ``root`` is the folder with ``dev``.

    Raises ``InvalidRequest`` where the memory of one of them cannot be known: slices of a GPU (MIG), whose parent alone the
    driver tells, and numbers that it withholds. Raises ``EngineFailure`` where the driver's command fails.
    """
    if not (root / _CONTROL).exists():
        return []
    command = shutil.which("nvidia-smi")
    if command is None:
        raise InvalidRequest(f"there is an NVIDIA GPU and no nvidia-smi to tell its memory, {_WAY}")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if chosen is None else [name.strip() for name in chosen.split(",")]
    if slices := [name for name in names or () if name.startswith(_MIG)]:
        raise InvalidRequest(
            f"CUDA_VISIBLE_DEVICES names {slices[0]}, a slice whose memory nvidia-smi does not tell, {_WAY}"
        )
    rows = _rows(command)
    if names is not None:
        rows = [row for name in names for row in rows if name and (name == row[0] or row[1].startswith(name))]
    return [_gpu(row) for row in rows]


def _rows(command: str) -> list[list[str]]:
    """Return the fields of ``_QUERY``, as text, for each of this machine's GPUs."""
    try:
        told = subprocess.run([command, *_QUERY], capture_output=True, text=True, check=True, timeout=_QUERY_DEADLINE_S)
    except subprocess.CalledProcessError as error:
        raise EngineFailure(
            f"nvidia-smi ends with status {error.returncode}: {error.stdout.strip()[-300:]}, {_WAY}"
        ) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineFailure(f"nvidia-smi does not tell the memory of the GPUs ({error}), {_WAY}") from error
    rows = [[part.strip() for part in line.split(",")] for line in told.stdout.splitlines()]
    return [row for row in rows if len(row) == _QUERY[0].count(",") + 1]


def _gpu(row: list[str]) -> Gpu:
    index, uuid, slices, total, free = row
    if slices == "Enabled":
        raise InvalidRequest(f"GPU {uuid} is cut into slices (MIG), whose memory nvidia-smi does not tell, {_WAY}")
    if not (total.isdigit() and free.isdigit()):
        raise InvalidRequest(
            f"nvidia-smi tells {total} as the memory of GPU {uuid}, and {free} as what is free, {_WAY}"
        )
    return Gpu(int(index), uuid, int(total) * 2**20, int(free) * 2**20)


def _bytes_of(meminfo: str, name: str) -> int | None:
    found = re.search(rf"{re.escape(name)}:\s+(\d+) kB", meminfo)
    return int(found[1]) * 1024 if found else None


def _cached(stat: Path, prefix: str) -> int:
    lines = stat.read_text().splitlines() if stat.is_file() else []
    sizes = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(sizes.get(f"{prefix}{part}", 0)) for part in _CACHED)


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None
