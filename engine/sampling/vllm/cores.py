"""Which cores a vLLM engine on the CPU computes on, where vLLM itself does not bind it."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_PROCESSES = Path("/proc")
_ENGINE = b"VLLM::EngineCore"
"""What stock vLLM's engines call themselves."""
log = logging.getLogger(__name__)


def bind_engine(group: int, variables: Mapping[str, str], processes: Path = _PROCESSES) -> frozenset[int]:
    """Keep the engine of the server in process group ``group`` off the last core; returns its cores, none if left alone.

    An engine is busy for as long as there are samples. Left to the kernel, it is moved about, and waits, whenever its
    front, weft or a client has a moment's work. ``variables`` is the server's environment: an engine that gives the model
    to worker processes is left alone, as those are bound by vLLM, and so is one that ``VLLM_CPU_OMP_THREADS_BIND`` speaks
    of. One that finds another engine of this machine bound is left free to go where that is not. ``processes`` lists the
    machine's.
    """
    allowed = os.sched_getaffinity(0)
    cores = frozenset(sorted(allowed)[:-1])
    is_vllms_own = (
        variables.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0"
        or variables.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto"
    )
    engines = list(_engines(processes))
    if not cores or is_vllms_own or any(_is_bound(pid, allowed) for pid in engines):
        return frozenset()
    for pid in engines:
        try:
            if os.getpgid(pid) == group:
                for thread in (processes / str(pid) / "task").iterdir():
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(int(thread.name), cores)
                log.info("vLLM's engine %d computes on cores %s", pid, sorted(cores))
                return cores
        except OSError as error:
            # It has ended meanwhile, or may not be touched: it is no worse without.
            log.info("vLLM's engine %d is left free: %s", pid, error)
    return frozenset()


def _engines(processes: Path) -> Iterator[int]:
    # They end while they are looked at.
    for entry in processes.iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(_ENGINE):
                yield int(entry.name)


def _is_bound(pid: int, allowed: set[int]) -> bool:
    with suppress(OSError):
        return not os.sched_getaffinity(pid) >= allowed
    return False
