"""Memory left on a machine, read from made-up files of the kernel and from a stand-in of the GPU driver's command."""

from pathlib import Path

import pytest

from contracts.errors import EngineFailure, InvalidRequest
from engine.machine_memory import Gpu, available_memory, smallest_memory_node, visible_gpus

GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [("max\n", "0\n", 8 * GIB), (f"{4 * GIB}\n", f"{GIB}\n", 3 * GIB), (f"{GIB}\n", f"{2 * GIB}\n", 0)],
)
def test_a_containers_limit_bounds_what_is_available(tmp_path: Path, limit: str, used: str, left: int) -> None:
    write(tmp_path, "proc/meminfo", MEMINFO)
    assert available_memory(tmp_path) == 8 * GIB
    write(tmp_path, "sys/fs/cgroup/memory.max", limit)
    write(tmp_path, "sys/fs/cgroup/memory.current", used)
    assert available_memory(tmp_path) == left


@pytest.mark.parametrize(
    ("folder", "limit", "used", "prefix"),
    [("", "memory.max", "memory.current", ""), ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")],
)
def test_files_that_the_kernel_keeps_for_a_container_are_available(
    tmp_path: Path, folder: str, limit: str, used: str, prefix: str
) -> None:
    """A base that was read leaves its files in memory: they go when a program needs the place."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    write(tmp_path, f"sys/fs/cgroup/{folder}{limit}", f"{4 * GIB}\n")
    write(tmp_path, f"sys/fs/cgroup/{folder}{used}", f"{4 * GIB - 1}\n")
    parts = f"anon {GIB}\nfile {3 * GIB}\n{prefix}inactive_file {2 * GIB}\n{prefix}active_file {GIB}\n"
    write(tmp_path, f"sys/fs/cgroup/{folder}memory.stat", parts)
    assert available_memory(tmp_path) == 3 * GIB + 1


def test_the_memory_node_with_least_counts(tmp_path: Path) -> None:
    assert smallest_memory_node(tmp_path) is None
    for node, free in enumerate((4, 2)):
        lines = f"Node {node} MemFree: {free * 2**20} kB\nNode {node} Active(file): {2**20} kB\n"
        write(tmp_path, f"sys/devices/system/node/node{node}/meminfo", lines)
    assert smallest_memory_node(tmp_path) == 3 * GIB


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, chosen: str | None = None) -> None:
    """Put a stand-in of ``nvidia-smi`` on the PATH, and the driver's device into ``folder``."""
    write(folder, "dev/nvidiactl", "")
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)


def telling(*lines: str) -> str:
    return "\n".join(f"echo '{line}'" for line in lines)


THREE = telling("0, GPU-a1, Disabled, 81920, 1024", "1, GPU-b1, [N/A], 81920, 2048", "2, GPU-c1, Disabled, 40960, 4096")
WAY = "set --gpu-memory-utilization in WEFT_VLLM_ARGUMENTS"


@pytest.mark.parametrize(
    ("chosen", "seen"), [(None, [0, 1, 2]), ("2,0", [2, 0]), ("GPU-b", [1]), ("", []), ("-1", []), ("7", [])]
)
def test_gpus_are_those_that_cuda_shows_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, seen: list[int]
) -> None:
    driver(tmp_path, monkeypatch, THREE, chosen)
    found = visible_gpus(tmp_path)
    assert [gpu.index for gpu in found] == seen
    if 1 in seen:
        assert Gpu(1, "GPU-b1", 80 * GIB, 2 * GIB) in found


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("0, GPU-a1, Enabled, 81920, 81000", "GPU-a1 is cut into slices"),
        ("0, GPU-a1, Disabled, [N/A], [N/A]", r"tells \[N/A\] as the memory of GPU GPU-a1"),
        ("0, GPU-a1, Disabled, 81920, [Insufficient Permissions]", r"and \[Insufficient Permissions\] as what is free"),
    ],
)
def test_a_gpu_whose_memory_is_not_told_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, cause: str
) -> None:
    lines = telling(line, "1, GPU-b1, Disabled, 81920, 2048")
    driver(tmp_path, monkeypatch, lines)
    with pytest.raises(InvalidRequest, match=cause) as refused:
        visible_gpus(tmp_path)
    assert WAY in refused.value.message
    # Another GPU of the machine, which this process does not use, bars nothing.
    driver(tmp_path, monkeypatch, lines, "GPU-b1")
    assert [gpu.uuid for gpu in visible_gpus(tmp_path)] == ["GPU-b1"]


@pytest.mark.parametrize("chosen", ["MIG-4ee7c8ba", "GPU-a1,MIG-GPU-a1/1/0"])
def test_a_slice_of_a_gpu_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    driver(tmp_path, monkeypatch, THREE, chosen)
    with pytest.raises(InvalidRequest, match="names MIG-") as refused:
        visible_gpus(tmp_path)
    assert WAY in refused.value.message


def test_a_driver_that_fails_is_told_and_may_be_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, "echo 'No devices were found'; exit 6")
    with pytest.raises(EngineFailure, match="status 6: No devices were found") as failed:
        visible_gpus(tmp_path)
    assert WAY in failed.value.message


def test_without_a_driver_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus(tmp_path) == []
    write(tmp_path, "dev/nvidiactl", "")
    with pytest.raises(InvalidRequest, match="no nvidia-smi") as refused:
        visible_gpus(tmp_path)
    assert WAY in refused.value.message
