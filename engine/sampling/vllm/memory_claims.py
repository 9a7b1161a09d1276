"""Notes of the memory that this machine's vLLM servers were given, each in its server's private folder.

The folder is gone with its server. So the memory that a server was promised and has not taken yet is known to the next one,
of whatever process of this user.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from engine.machine_memory import available_memory, smallest_memory_node, visible_gpus
from engine.sampling.vllm.server_memory import CPU, MemoryClaim, MemoryNeed, ServerMemory, give_on_cpu, give_on_gpus

FOLDER_PREFIX = "weft-vllm-"
"""Beginning of the names of servers' private folders, in the folder for temporary files."""
_NOTE = "memory.json"
_PROCESSES = Path("/proc")
_GROUP, _BEGAN, _RESIDENT = 2, 19, 21
"""Places in ``/proc/PID/stat``, after the command's name: the process group, the beginning, and the pages in memory."""


class MemoryNote(msgspec.Struct):
    """A server's memory. ``group`` is its process group, 0 before its start; ``is_up`` once it has taken a GPU's memory.

    ``began`` is the beginning of the process ``group``, or of ``owner`` without one: numbers of processes are used again.
    """

    owner: int
    memory: ServerMemory
    group: int = 0
    is_up: bool = False
    began: str = ""

    def dated(self) -> "MemoryNote":
        """Return the note with the beginning of its process."""
        return msgspec.structs.replace(self, began=_beginning(self.group or self.owner))


@contextmanager
def memory_of_machine() -> Iterator[None]:
    """Let no other process of this user read claims and write one meanwhile. Blocks: enter it on a thread."""
    with (Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}memory-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def give_memory(need: MemoryNeed, folder: Path, *, on_cpu: bool) -> ServerMemory | None:
    """Return the memory for the server with the private folder ``folder``, and note it there. Blocks.

    None on an accelerator whose memory nobody tells: vLLM then takes what it takes. Raises ``EngineFailure`` where too little is
    left, ``InvalidRequest`` where the device is too small.
    """
    with memory_of_machine():
        claims = list(memory_claims())
        if on_cpu:
            node = smallest_memory_node()
            left = available_memory() if node is None else min(node, available_memory())
            memory = give_on_cpu(need, left, claims)
        elif gpus := visible_gpus():
            memory = give_on_gpus(need, gpus, claims)
        else:
            return None
        write_note(folder, MemoryNote(os.getpid(), memory))
    return memory


def write_note(folder: Path, note: MemoryNote) -> None:
    """Write a server's note anew, at once and whole."""
    new = folder / f"{_NOTE}.new"
    new.write_bytes(msgspec.json.encode(note.dated()))
    new.replace(folder / _NOTE)


def forget_note(folder: Path) -> None:
    """Take back what ``give_memory`` noted in the private folder ``folder``."""
    (folder / _NOTE).unlink(missing_ok=True)


def memory_claims() -> Iterator[MemoryClaim]:
    """Yield the claims of this user's servers that are starting or running on this machine."""
    for file in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{_NOTE}"):
        # The folder may be removed meanwhile, or be another user's.
        with suppress(OSError, msgspec.DecodeError):
            if file.stat().st_uid != os.getuid():
                continue
            note = msgspec.json.decode(file.read_bytes(), type=MemoryNote)
            if note.began and note.began == _beginning(note.group or note.owner):
                yield MemoryClaim(note.owner, note.memory, _untaken(note))


def _beginning(process: int) -> str:
    """Return when a process began, in ticks since the machine did; empty for one that is gone."""
    try:
        return _fields(process)[_BEGAN]
    except (OSError, IndexError):
        return ""


def _fields(process: int | str) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` that follow the command's name."""
    return (_PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()


def _untaken(note: MemoryNote) -> int:
    if CPU in note.memory.devices:
        # A page is taken when it is first written, which for keys and values may be hours later.
        return max(0, note.memory.given - _resident_bytes(note.group))
    return 0 if note.is_up else note.memory.given


def _resident_bytes(group: int) -> int:
    pages = 0
    for entry in _PROCESSES.iterdir():
        # A process may end while it is read.
        with suppress(OSError, IndexError):
            if group and entry.name.isdigit():
                fields = _fields(entry.name)
                pages += int(fields[_RESIDENT]) if int(fields[_GROUP]) == group else 0
    return pages * os.sysconf("SC_PAGE_SIZE")
