"""Starts, watches and ends a vLLM server as a child process of weft, in a Python environment of its own."""

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from contracts.errors import EngineFailure, InvalidRequest
from engine.sampling.vllm import guard as vllm_guard
from engine.sampling.vllm.cores import bind_engine, one_process_variables
from engine.sampling.vllm.http import UNIX, VllmHttp
from engine.sampling.vllm.memory_claims import FOLDER_PREFIX, MemoryNote, forget_note, give_memory, write_note
from engine.sampling.vllm.served_length import served_length
from engine.sampling.vllm.server_log import MOST_BYTES, ServerLog
from engine.sampling.vllm.server_memory import MemoryNeed, ServerMemory, is_sized_by_operator
from engine.sampling.vllm.start_failures import explain_start_failure
from engine.sampling.vllm.start_turns import end_of_turn, is_someones_turn, turn

_SOCKET = "api.sock"
_TAIL_BYTES = 4000
_CAUSE_BYTES = 2**18
"""End of the log in which the cause of a failed start is looked for."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be started with (``MaxLoRARanks`` in its ``config/lora.py``)."""
_PROBE_EVERY_S = 0.25
_PROBE_DEADLINE_S = 5.0
# Time for the guard to end after its server.
_GUARD_S = 5.0
# Variables of weft's own interpreter. vLLM runs in another one.
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_HEAD = "lm_head"
_NO_HEAD = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_log = logging.getLogger(__name__)


def served_rank(largest: int) -> int:
    """Return the largest rank that a server is started with, so that it takes adapters up to rank ``largest``.

    Raises ``InvalidRequest`` for a rank that vLLM has no place for.
    """
    found = next((rank for rank in _LORA_RANKS if rank >= largest), None)
    if found is None:
        raise InvalidRequest(
            f"WEFT_MAX_RANK is {largest}, and vLLM takes adapters up to rank {_LORA_RANKS[-1]}: lower it, or leave out "
            "WEFT_VLLM_REPLICAS, and weft samples by itself"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmProcessSettings:
    """Settings to start one server. Names that end in ``_s`` are in seconds.

    - ``model`` is the base's folder, ``served_model`` its name in weft, ``context_length`` its context in tokens.
    - ``max_loras`` adapters fit one batch; ``max_cpu_loras`` stay in memory; ``max_sequences`` are drawn at once.
    - ``on_cpu``: prompts are not split over steps, because vLLM on a CPU dies of a seeded prompt that it splits.
    - ``tune_cpu``: with ``on_cpu``, engine and model share a process that keeps off one core (``engine.sampling.vllm.cores``).
    - ``target_modules``: layers that adapters may change, besides the head with ``head_adapters``. None: with the head, all.
    - ``need``: what its memory is reckoned from. None, or options in ``extra`` that say a size: weft gives it none.
    - ``extra``: more arguments, such as ``--tensor-parallel-size``. ``environment`` is added to weft's own.
    - ``log``: file that the server's output is appended to, looked at every ``log_look_s`` and moved aside beyond ``log_bytes``.
    """

    command: tuple[str, ...]
    model: Path
    served_model: str
    log: Path
    context_length: int
    max_lora_rank: int
    max_loras: int
    max_cpu_loras: int
    on_cpu: bool
    max_sequences: int = 256
    tune_cpu: bool = True
    head_adapters: bool = False
    target_modules: tuple[str, ...] | None = None
    max_logprobs: int = 20
    dtype: str = "auto"
    need: MemoryNeed | None = None
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    start_deadline_s: float = 900.0
    stop_grace_s: float = 15.0
    log_bytes: int = MOST_BYTES
    log_look_s: float = 60.0

    @property
    def tunes_cores(self) -> bool:
        """True if ``engine.sampling.vllm.cores`` applies to this server."""
        return self.on_cpu and self.tune_cpu

    def arguments(self, socket: Path, memory: ServerMemory | None = None) -> list[str]:
        """Return the whole command line of a server that listens on ``socket`` and on no port."""
        flags = {
            "--model": self.model.absolute(),
            "--served-model-name": self.served_model,
            "--uds": socket,
            # One more: vLLM counts the last drawn token, which needs no place, so a prompt of the whole context can be scored.
            # Not where that would change the base's positions.
            "--max-model-len": served_length(self.model, self.context_length + 1),
            "--max-lora-rank": self.max_lora_rank,
            "--max-loras": self.max_loras,
            "--max-cpu-loras": self.max_cpu_loras,
            "--max-num-seqs": self.max_sequences,
            "--max-logprobs": self.max_logprobs,
            "--dtype": self.dtype,
        }
        # Without scale-out, vLLM refuses token ids as input and output.
        line = [*self.command, "--enable-lora", "--enable-scale-out"]
        # A log line for each request would take time from the tokens.
        line.append("--disable-uvicorn-access-log")
        # How much of a prompt the prefix cache had.
        line.append("--enable-prompt-tokens-details")
        # Left to itself, vLLM takes for all requests what the first one needs, and not every backend has every form.
        line += ["--structured-outputs-config", '{"backend": "xgrammar"}']
        line += [str(part) for pair in flags.items() for part in pair]
        if self.target_modules is not None or not self.head_adapters:
            head = [_HEAD] if self.head_adapters else []
            line += ["--lora-target-modules", *(self.target_modules or _NO_HEAD), *head]
        if self.on_cpu:
            line.append("--no-enable-chunked-prefill")
        if memory is not None:
            line += memory.arguments()
        return line + list(self.extra)

    def variables(self, memory: ServerMemory | None = None) -> dict[str, str]:
        """Return the whole environment."""
        own = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        needed = {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            # Development mode: pause, sleep, and the server's own limits at /server_info.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self.api_key is not None:
            needed["VLLM_API_KEY"] = self.api_key
        devices = {} if memory is None else memory.variables()
        return (one_process_variables() if self.tunes_cores else {}) | own | needed | devices | dict(self.environment)


def has_accelerator() -> bool:
    """Tell whether this machine has a device that vLLM would use instead of the CPU: NVIDIA's, AMD's or an accelerator."""
    return any(next(Path("/dev").glob(pattern), None) for pattern in ("nvidiactl", "kfd", "accel/*", "davinci*"))


class VllmProcess:
    """One run of a server. To start the server again, make another ``VllmProcess``. Use within one event loop.

    The server runs under a guard process (``engine.sampling.vllm.guard``), which ends all its processes when weft ends,
    however weft dies. If weft and the guard are killed at once, the server still gets SIGTERM; a server that ignores it
    stays. A process forked off weft without exec keeps the server alive until it ends, too.

    The server listens on a Unix socket in a folder that only weft's user may enter: vLLM's API key would leave the routes
    of its development mode open, which run code and stop the engine.
    """

    def __init__(self, settings: VllmProcessSettings) -> None:
        self._settings = settings
        self._guard: asyncio.subprocess.Process | None = None
        self._group = 0
        self._folder: Path | None = None
        self._log = ServerLog(settings.log, settings.log_bytes)
        self._watch: asyncio.Task[None] | None = None
        self.base_url = ""
        self.died = asyncio.Event()
        """Set once the server has ended, by ``stop`` or by itself."""
        self.memory: ServerMemory | None = None
        """Memory that weft gave the server; None before the start, and where the operator or vLLM itself sizes it."""
        self.exit_code: int | None = None
        """Exit status of a server that has ended; 128 and more for a signal, negative when its guard was killed."""

    async def start(self) -> None:
        """Start the server and wait until it is healthy.

        Raises ``InvalidRequest`` for a device that is too small, and ``EngineFailure`` for too little memory left, or with the
        cause, or the end of the log, when the server ends or is not healthy in time.
        """
        # Not in the data folder: a socket's path has at most 107 characters. ``mkdtemp`` makes it for its owner only.
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        with ExitStack() as turns:
            try:
                await self._give_memory(self._folder, turns)
                await self._start_guard(self._folder / _SOCKET)
            except BaseException:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise
            await self._come_up()

    async def _come_up(self) -> None:
        is_up = False
        try:
            async with asyncio.timeout(self._settings.start_deadline_s):
                await self._wait_until_healthy()
            if self._settings.tunes_cores:
                bind_engine(self._group, self._settings.variables())
            self._note_memory(is_up=True)
            is_up = True
        except TimeoutError as error:
            raise self._did_not_start(f"was not healthy in {self._settings.start_deadline_s:.0f} s") from error
        finally:
            if not is_up:
                await self.stop()

    async def _give_memory(self, folder: Path, turns: ExitStack) -> None:
        """Set the server's memory; on GPUs once it is its turn to start there, which ``turns`` ends."""
        settings = self._settings
        if settings.need is None or is_sized_by_operator(settings.extra, settings.variables()):
            return
        while True:
            memory = await asyncio.to_thread(give_memory, settings.need, folder, on_cpu=settings.on_cpu)
            if memory is None:
                return
            if not is_someones_turn(memory.gpus):
                break
            # Reckoned again afterwards: what the other one has by then is gone from the GPU, and was promised to it, too.
            forget_note(folder)
            await end_of_turn(memory.gpus)
        turns.enter_context(turn(memory.gpus))
        self.memory = memory
        _log.info("a vLLM server for %s gets %s", settings.served_model, memory)

    def _note_memory(self, *, is_up: bool) -> None:
        if self.memory is not None and self._folder is not None and self._folder.exists():
            write_note(self._folder, MemoryNote(os.getpid(), self.memory, self._group, is_up))

    async def _start_guard(self, socket: Path) -> None:
        self.base_url = f"{UNIX}{socket}"
        guard = [sys.executable, "-I", vllm_guard.__file__, str(self._settings.stop_grace_s), str(socket.parent)]
        with self._log.open() as log:
            self._guard = await asyncio.create_subprocess_exec(
                *guard,
                *self._settings.arguments(socket, self.memory),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._settings.variables(self.memory),
                # Started in a folder other than weft's own: from weft's folder the server would import weft's packages.
                cwd=self._settings.log.parent,
            )
        self._watch = asyncio.create_task(self._watch_over(self._guard))

    async def stop(self) -> None:
        """End all processes of the server: SIGTERM, and SIGKILL after the grace. Safe to repeat."""
        if self._guard is None or self._watch is None:
            return
        with suppress(ProcessLookupError):
            self._guard.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._watch], timeout=self._settings.stop_grace_s + _GUARD_S)
        if not done:
            self.kill()
            self._guard.kill()
            await asyncio.wait([self._watch])

    def kill(self) -> None:
        """Send SIGKILL to the server and its workers; ``died`` is set once they have ended."""
        if self.died.is_set():
            return
        if self._group:
            with suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)

    @property
    def group(self) -> int:
        """Process group of the server and its workers; 0 before the start."""
        return self._group

    def log_tail(self) -> str:
        """Return the last 4,000 bytes of the log."""
        return self._log.end(_TAIL_BYTES)

    async def _watch_over(self, guard: asyncio.subprocess.Process) -> None:
        if guard.stdout is not None:
            first = await guard.stdout.readline()
            self._group = int(first) if first.strip().isdigit() else 0
            self._note_memory(is_up=False)
        self.exit_code = await self._end_of(guard)
        # Needed only if the guard itself was killed: otherwise no process and no folder is left.
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.died.set()

    async def _end_of(self, guard: asyncio.subprocess.Process) -> int:
        """Wait for the guard's end and return its status; keep the log within its bound till then."""
        ended = asyncio.ensure_future(guard.wait())
        while not (await asyncio.wait([ended], timeout=self._settings.log_look_s))[0]:
            try:
                await asyncio.to_thread(self._log.bound)
            except OSError as error:
                # The server runs on: a full disk is told by what needs it.
                _log.warning("the log %s cannot be moved aside: %s", self._settings.log, error)
        return await ended

    async def _wait_until_healthy(self) -> None:
        http = VllmHttp("starting", self.base_url, None, 1)
        await http.open()
        try:
            while not await self._is_healthy(http):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PROBE_EVERY_S):
                        await self.died.wait()
                if self.died.is_set():
                    raise self._did_not_start(f"ended with status {self.exit_code}")
        finally:
            await http.close()

    async def _is_healthy(self, http: VllmHttp) -> bool:
        try:
            return (await http.get("/health", _PROBE_DEADLINE_S)).ok
        except EngineFailure:
            return False

    def _did_not_start(self, what: str) -> EngineFailure:
        cause = explain_start_failure(self._log.end_of_run(_CAUSE_BYTES), is_sized_by_weft=self.memory is not None)
        if cause is not None:
            return EngineFailure(f"the vLLM server {what}: {cause} (its log: {self._settings.log})")
        return EngineFailure(f"the vLLM server {what}; the end of its log:\n{self.log_tail()}")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
