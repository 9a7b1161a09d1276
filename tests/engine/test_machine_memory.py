"""Memory left on a machine, read from made-up files of the kernel and from a stand-in of the GPU driver's command."""

from pathlib import Path

import pytest

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


def test_the_memory_node_with_least_counts(tmp_path: Path) -> None:
    assert smallest_memory_node(tmp_path) is None
    for node, free in enumerate((4, 2)):
        lines = f"Node {node} MemFree: {free * 2**20} kB\nNode {node} Active(file): {2**20} kB\n"
        write(tmp_path, f"sys/devices/system/node/node{node}/meminfo", lines)
    assert smallest_memory_node(tmp_path) == 3 * GIB


@pytest.mark.parametrize(
    ("chosen", "seen"), [(None, [0, 1, 2]), ("2,0", [2, 0]), ("GPU-b", [1]), ("", []), ("-1", []), ("7", [])]
)
def test_gpus_are_those_that_cuda_shows_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, seen: list[int]
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(
        "#!/bin/sh\necho '0, GPU-a1, 81920, 1024'\necho '1, GPU-b1, 81920, 2048'\necho '2, GPU-c1, 40960, 4096'\n"
    )
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    found = visible_gpus()
    assert [gpu.index for gpu in found] == seen
    if 1 in seen:
        assert Gpu(1, "GPU-b1", 80 * GIB, 2 * GIB) in found


def test_without_a_driver_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == []
