"""The one protocol of a sampling replica: torch in this process, or vLLM over HTTP."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.contracts.ids import RequestId
from engine.contracts.operations import SampleOutput, SampleRequest


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """Weights that never change: an immutable PEFT ``directory`` under its own ``name`` (``run@version``)."""

    name: str
    directory: Path


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One ``sample`` operation; ``adapter`` None samples from the bare base."""

    request_id: RequestId
    sample: SampleRequest
    adapter: AdapterVersion | None = None


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """``running`` sequences decode now, ``waiting`` requests have not begun; ``adapters`` are the resident names."""

    alive: bool
    running: int
    waiting: int
    adapters: tuple[str, ...]


class SamplerReplica(Protocol):
    """Generates samples of the base and of any number of adapter versions, which it loads on demand."""

    async def start(self) -> None:
        """Make ready; call once, before anything else."""

    async def close(self) -> None:
        """Fail whatever is outstanding with ``EngineFailure`` and free the resources; safe to repeat."""

    async def generate(self, request: GenerateRequest) -> SampleOutput:
        """Run ``request`` to its end; cancelling the call aborts it.

        Raises ``InvalidRequest`` for what the caller must change and ``EngineFailure`` for everything else, an abort
        included.
        """

    async def abort(self, request_id: RequestId) -> bool:
        """Cut a request: its ``generate`` raises ``EngineFailure``. False when no such request is outstanding."""

    async def load(self, version: AdapterVersion) -> None:
        """Make ``version`` resident ahead of its first request. Raises as ``generate`` does."""

    async def unload(self, name: str) -> None:
        """Forget every resident version called ``name``; requests that already use it end undisturbed."""

    async def health(self) -> ReplicaHealth:
        """What the replica is doing."""
