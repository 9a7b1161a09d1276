"""Sets the CPU cores of a vLLM server that weft starts: engine and model share one process, which leaves one core free.

Decision 22 says why. Everything here is behind the setting ``vllm_tune_cpu``.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_MEMORY_NODES = Path("/sys/devices/system/node")
_PROCESSES = Path("/proc")
_ENGINE = b"VLLM::EngineCore"
"""Process name of a stock vLLM engine."""
_MULTIPROCESSING, _BINDING = "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"
_log = logging.getLogger(__name__)


def one_process_variables(memory_nodes: Path = _MEMORY_NODES) -> dict[str, str]:
    """Return environment variables that keep vLLM's engine and model in one process, with one thread fewer than cores.

    Empty on a machine with several memory nodes, where vLLM binds its own worker processes to the nodes.
    """
    if len(list(memory_nodes.glob("node[0-9]*"))) > 1:
        return {}
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    return {_MULTIPROCESSING: "0", "OMP_NUM_THREADS": str(threads)}


def bind_engine(group: int, variables: Mapping[str, str], processes: Path = _PROCESSES) -> frozenset[int]:
    """Keep the engine in process group ``group`` off the last core; return its cores, empty when it is left alone.

    An engine is left alone in three cases:

    - Its server's environment, ``variables``, lets vLLM give the model to worker processes, which vLLM binds itself.
    - ``VLLM_CPU_OMP_THREADS_BIND`` in it tells vLLM how to bind.
    - Another engine of this machine is bound already. Both would run on the same cores.

    ``processes`` is the folder that lists the machine's processes.
    """
    allowed = os.sched_getaffinity(0)
    cores = frozenset(sorted(allowed)[:-1])
    engines = list(_engines(processes))
    is_vllms_own = variables.get(_MULTIPROCESSING) != "0" or variables.get(_BINDING, "auto") != "auto"
    if not cores or is_vllms_own or any(_is_bound(pid, allowed) for pid in engines):
        return frozenset()
    for pid in engines:
        try:
            if os.getpgid(pid) == group:
                for thread in (processes / str(pid) / "task").iterdir():
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(int(thread.name), cores)
                _log.info("vLLM's engine %d computes on cores %s", pid, sorted(cores))
                return cores
        except OSError as error:
            # The engine has ended, or may not be changed. An unbound engine works, only slower.
            _log.info("vLLM's engine %d is left free: %s", pid, error)
    return frozenset()


def _engines(processes: Path) -> Iterator[int]:
    for entry in processes.iterdir():
        # A process may end while it is read.
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(_ENGINE):
                yield int(entry.name)


def _is_bound(pid: int, allowed: set[int]) -> bool:
    with suppress(OSError):
        return not os.sched_getaffinity(pid) >= allowed
    return False
