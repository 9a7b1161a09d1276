"""Turns vLLM's usual failures at the start into one line that says what to set."""

import re
from collections.abc import Callable
from re import Match
from typing import NamedTuple


class _Ways(NamedTuple):
    """Ways to give a server less memory, and more."""

    less: str
    more: str


_Say = Callable[[Match[str], _Ways], str]
_OWN_SIZE = "in WEFT_VLLM_ARGUMENTS or VLLM_CPU_KVCACHE_SPACE, or leave its size to weft"
_OF_WEFT = _Ways("set a smaller WEFT_VLLM_MEMORY_SHARE", "set a larger WEFT_VLLM_MEMORY_SHARE")
_OF_OPERATOR = _Ways(f"ask for less {_OWN_SIZE}", f"ask for more {_OWN_SIZE}")


def explain_start_failure(log: str, *, is_sized_by_weft: bool = True) -> str | None:
    """Return one line for the failure in a server's log, with what to change; None for a failure that is not known.

    ``is_sized_by_weft``: weft gave the server its memory, not the operator's arguments or environment.
    """
    for pattern, say in _FAILURES:
        if (found := re.search(pattern, log)) is not None:
            return say(found, _OF_WEFT if is_sized_by_weft else _OF_OPERATOR)
    return None


def _memory(found: Match[str], ways: _Ways) -> str:
    return (
        f"of {found['total']} GiB of memory on its device {found['left']} GiB are free, and it wants {found['wanted']} GiB: "
        f"free memory, or {ways.less}"
    )


def _context(found: Match[str], ways: _Ways) -> str:
    fits = re.search(r"estimated maximum model length is (\d+)", found.string)
    length = f"at most {fits[1]}" if fits and int(fits[1]) else f"less than {found['context']}"
    return (
        f"keys and values of one sequence of {found['context']} tokens take {found['needed']} GiB, and {found['left']} GiB are "
        f"left for them: set WEFT_VLLM_CONTEXT_LENGTH to {length}, or {ways.more}"
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
        lambda _, ways: (
            f"weights and adapters leave no memory for keys and values: {ways.more}, set a smaller WEFT_MAX_RANK or "
            "WEFT_VLLM_MAX_LORAS, or spread the model over GPUs (--tensor-parallel-size in WEFT_VLLM_ARGUMENTS)"
        ),
    ),
    (
        r"(?:OutOfMemoryError|out of memory|Cannot allocate memory|can't allocate memory)",
        lambda _, ways: (
            f"its device ran out of memory: free memory, {ways.less}, or spread the model over "
            'GPUs with WEFT_VLLM_ARGUMENTS=\'["--tensor-parallel-size","2"]\''
        ),
    ),
    (
        r"(?:No module named '?vllm|No such file or directory: '(?P<command>[^']+)')",
        lambda found, _: (
            f"there is no vLLM at {found['command'] or 'its command'}: run `make vllm`, or set WEFT_VLLM_COMMAND"
        ),
    ),
    (
        r"unrecognized arguments: (?P<words>.+)",
        lambda found, _: (
            f"this vLLM does not know {found['words'].strip()}: correct WEFT_VLLM_ARGUMENTS, or take a newer vLLM"
        ),
    ),
    (
        r"Model architectures \[(?P<names>[^\]]*)\] (?:are not supported|failed to be inspected)",
        lambda found, _: (
            f"this vLLM does not serve {found['names']}: take another vLLM, or sample in process (WEFT_VLLM_REPLICAS=0)"
        ),
    ),
    (
        r"(?P<name>\w+) does not support LoRA",
        lambda found, _: (
            f"this vLLM takes no adapters on {found['name']}: take another vLLM, or sample in process "
            "(WEFT_VLLM_REPLICAS=0)"
        ),
    ),
    (
        r"Sleep mode is not supported on current platform",
        lambda *_: "vLLM has no sleep mode on this device: leave --enable-sleep-mode out of WEFT_VLLM_ARGUMENTS",
    ),
    (
        r"VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with api_server_count",
        lambda *_: (
            "an adapter is loaded in one process of a server only: leave --api-server-count and --data-parallel-size out of "
            "WEFT_VLLM_ARGUMENTS, and set WEFT_VLLM_REPLICAS to have more servers"
        ),
    ),
    (
        r"Bfloat16 is only supported on GPUs with compute capability",
        lambda *_: "this GPU does not compute in bfloat16: set WEFT_BASE_DTYPE=float16",
    ),
)
