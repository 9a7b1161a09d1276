"""Binding of engines to cores, with stand-ins that have the process name of vLLM's engines."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engine.sampling.vllm.cores import bind_engine, one_process_variables

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Machine:
    """Processes that sleep, and the folder in which only they are listed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, group: int = 0) -> int:
        sleep = shutil.which("sleep")
        assert sleep is not None
        process = subprocess.Popen([name, "600"], executable=sleep, process_group=group)
        self._started.append(process)
        # Linux tells that a program has begun a moment before it shows its command line.
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            continue
        (self.folder / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        return process.pid

    def bind(self, group: int, variables: Mapping[str, str] = ONE_PROCESS) -> frozenset[int]:
        return bind_engine(group, variables, self.folder)

    def stop(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.stop()


@pytest.fixture
def all_cores() -> set[int]:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    return cores


def test_an_engine_keeps_off_the_last_core_and_its_front_and_another_server_do_not(
    machine: Machine, all_cores: set[int]
) -> None:
    front = machine.start("python")
    engine = machine.start("VLLM::EngineCore", front)
    other = machine.start("VLLM::EngineCore")
    assert machine.bind(front) == os.sched_getaffinity(engine) == all_cores - {max(all_cores)}
    assert os.sched_getaffinity(front) == os.sched_getaffinity(other) == all_cores


def test_an_engine_beside_one_that_is_bound_is_left_free(machine: Machine, all_cores: set[int]) -> None:
    """Both would share one of two cores."""
    first, second = machine.start("VLLM::EngineCore"), machine.start("VLLM::EngineCore")
    assert machine.bind(first)
    assert machine.bind(second) == frozenset()
    assert os.sched_getaffinity(second) == all_cores
    assert os.sched_getaffinity(first) != all_cores


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        ONE_PROCESS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        ONE_PROCESS | {"VLLM_CPU_OMP_THREADS_BIND": "0"},
    ],
)
def test_what_vllm_or_its_operator_binds_is_left_alone(
    machine: Machine, all_cores: set[int], variables: dict[str, str]
) -> None:
    engine = machine.start("VLLM::EngineCore")
    assert machine.bind(engine, variables) == frozenset()
    assert os.sched_getaffinity(engine) == all_cores


def test_an_engine_that_ends_while_it_is_looked_at_is_no_failure(machine: Machine, all_cores: set[int]) -> None:
    """A server starts all the same, and another one's engine is not touched."""
    engine, other = machine.start("VLLM::EngineCore"), machine.start("VLLM::EngineCore")
    place = machine.folder / str(engine)
    place.unlink()
    place.mkdir()
    (place / "cmdline").write_bytes(b"VLLM::EngineCore")
    assert machine.bind(engine) == frozenset()
    assert os.sched_getaffinity(other) == all_cores


def test_on_a_single_core_there_is_nothing_to_bind_to(machine: Machine) -> None:
    engine, cores = machine.start("VLLM::EngineCore"), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert machine.bind(engine) == frozenset()
    finally:
        os.sched_setaffinity(0, cores)
    assert os.sched_getaffinity(engine) == cores


def test_engine_and_model_share_a_process_where_there_is_one_memory_node(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    defaults = one_process_variables(tmp_path)
    assert defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert int(defaults["OMP_NUM_THREADS"]) >= 1
    (tmp_path / "node1").mkdir()
    assert one_process_variables(tmp_path) == {}
