"""Turns vLLM's usual failures at the start into one line that says what to set."""

import re
from collections.abc import Callable
from re import Match

_Say = Callable[[Match[str]], str]


def explain_start_failure(log: str) -> str | None:
    """Return one line for the failure in a server's log, with what to change; None for a failure that is not known."""
    for pattern, say in _FAILURES:
        if (found := re.search(pattern, log)) is not None:
            return say(found)
    return None


def _memory(found: Match[str]) -> str:
    return (
        f"of {found['total']} GiB of memory on its device {found['left']} GiB are free, and it wants {found['wanted']} GiB: "
        "free memory, or set a smaller WEFT_VLLM_MEMORY_SHARE"
    )


def _context(found: Match[str]) -> str:
    fits = re.search(r"estimated maximum model length is (\d+)", found.string)
    length = f"at most {fits[1]}" if fits and int(fits[1]) else f"less than {found['context']}"
    return (
        f"keys and values of one sequence of {found['context']} tokens take {found['needed']} GiB, and {found['left']} GiB are "
        f"left for them: set WEFT_VLLM_CONTEXT_LENGTH to {length}, or a larger WEFT_VLLM_MEMORY_SHARE"
    )


_FREE = r"\((?P<left>[\d.]+)/(?P<total>[\d.]+) GiB\)"
_FAILURES: tuple[tuple[str, _Say], ...] = (
    (
        rf"emory on (?:node|device) \S+ {_FREE} on startup is less than desired .*?\([\d.]+, (?P<wanted>[\d.]+) GiB\)",
        _memory,
    ),
    (
        rf"emory on node \S+ {_FREE} on kv cache allocation is less than requested memory for kv \((?P<wanted>[\d.]+)",
        _memory,
    ),
    (
        r"max seq len \((?P<context>\d+)\), \(?(?P<needed>[\d.]+) GiB KV cache is needed, which is larger than the available "
        r"KV cache memory \((?P<left>[\d.]+) GiB\)",
        _context,
    ),
    (
        r"No available memory for the cache blocks",
        lambda _: (
            "weights and adapters leave no memory for keys and values: set a larger WEFT_VLLM_MEMORY_SHARE, a smaller "
            "WEFT_MAX_RANK or WEFT_VLLM_MAX_LORAS, or spread the model over GPUs (--tensor-parallel-size in WEFT_VLLM_ARGUMENTS)"
        ),
    ),
    (
        r"(?:OutOfMemoryError|out of memory|Cannot allocate memory|can't allocate memory)",
        lambda _: (
            "its device ran out of memory: free memory, set a smaller WEFT_VLLM_MEMORY_SHARE, or spread the model over "
            'GPUs with WEFT_VLLM_ARGUMENTS=\'["--tensor-parallel-size","2"]\''
        ),
    ),
    (
        r"(?:No module named '?vllm|No such file or directory: '(?P<command>[^']+)')",
        lambda found: (
            f"there is no vLLM at {found['command'] or 'its command'}: run `make vllm`, or set WEFT_VLLM_COMMAND"
        ),
    ),
    (
        r"unrecognized arguments: (?P<words>.+)",
        lambda found: (
            f"this vLLM does not know {found['words'].strip()}: correct WEFT_VLLM_ARGUMENTS, or take a newer vLLM"
        ),
    ),
    (
        r"Model architectures \[(?P<names>[^\]]*)\] (?:are not supported|failed to be inspected)",
        lambda found: (
            f"this vLLM does not serve {found['names']}: take another vLLM, or sample in process (WEFT_VLLM_REPLICAS=0)"
        ),
    ),
    (
        r"(?P<name>\w+) does not support LoRA",
        lambda found: (
            f"this vLLM takes no adapters on {found['name']}: take another vLLM, or sample in process "
            "(WEFT_VLLM_REPLICAS=0)"
        ),
    ),
    (
        r"Sleep mode is not supported on current platform",
        lambda _: "vLLM has no sleep mode on this device: leave --enable-sleep-mode out of WEFT_VLLM_ARGUMENTS",
    ),
    (
        r"Bfloat16 is only supported on GPUs with compute capability",
        lambda _: "this GPU does not compute in bfloat16: set WEFT_BASE_DTYPE=float16",
    ),
)
