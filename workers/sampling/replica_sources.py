"""Where replicas come from: vLLM servers that are there, and vLLM servers that weft starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from engine.sampling.replica import SamplerReplica
from engine.sampling.vllm.process import VllmProcess, VllmProcessSettings, has_accelerator, server_command
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.settings import VllmSettings
from store.data_folder import DataFolder
from store.settings import Settings

RESIDENT_PER_SLOT = 8
_OWN_SPARE_PLACES = 1
"""Adapters listed on a server for each that fits its batch."""


class ReplicaSource(Protocol):
    """Makes one replica, and another one when that is lost."""

    @property
    def name(self) -> str:
        """Of the replica."""

    async def start(self) -> SamplerReplica:
        """A replica that is ready. Raises ``InvalidRequest`` when it can never be, ``EngineFailure`` when it is not now."""

    async def stop(self) -> None:
        """End what ``start`` began, but for the replica itself."""


@dataclass(frozen=True, slots=True)
class ExternalVllm:
    """A server that somebody else runs."""

    settings: VllmSettings

    @property
    def name(self) -> str:
        """Of the replica."""
        return self.settings.name

    async def start(self) -> SamplerReplica:
        """See ``ReplicaSource``."""
        replica = VllmReplica(self.settings)
        await replica.start()
        return replica

    async def stop(self) -> None:
        """The server goes on."""


class ManagedVllm:
    """A server that weft starts and ends. ``settings`` say all but where it listens."""

    def __init__(self, settings: VllmSettings, process: VllmProcessSettings) -> None:
        self._settings = settings
        self._process_settings = process
        self._process: VllmProcess | None = None

    @property
    def name(self) -> str:
        """Of the replica."""
        return self._settings.name

    async def start(self) -> SamplerReplica:
        """See ``ReplicaSource``; what an earlier start has left is ended first."""
        await self.stop()
        self._process = VllmProcess(self._process_settings)
        await self._process.start()
        replica = VllmReplica(replace(self._settings, base_url=self._process.base_url))
        await replica.start()
        return replica

    async def stop(self) -> None:
        """End the server."""
        if self._process is not None:
            await self._process.stop()


def vllm_sources(settings: Settings, facts: BaseModelFacts, data_folder: DataFolder) -> Sequence[ReplicaSource]:
    """The vLLM servers that the settings name for a base model, maybe none.

    Raises ``InvalidRequest`` for a URL without a scheme.
    """
    urls = [url for name, url in map(split_url, settings.vllm_urls) if name in (None, facts.name)]
    sources: list[ReplicaSource] = [
        ExternalVllm(_vllm_settings(settings, facts, data_folder, f"vllm-{url.partition('://')[2]}", url))
        for url in urls
    ]
    sources += [
        ManagedVllm(
            _vllm_settings(settings, facts, data_folder, f"vllm-{number}", ""),
            _process_settings(settings, facts, data_folder, f"vllm-{number}"),
        )
        for number in range(settings.vllm_replicas)
    ]
    return sources


def split_url(spec: str) -> tuple[str | None, str]:
    """Base model name, if any, and URL of ``[NAME=]URL``. Raises ``InvalidRequest`` for a URL without a scheme."""
    name, _, url = spec.rpartition("=")
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"vllm_urls: {spec[:200]!r} must be [NAME=]http://host:port")
    return name or None, url.rstrip("/")


def replica_name(settings: Settings, own: str) -> str:
    """One of a kind in a cluster: other pools have replicas of the same ``own`` name."""
    return f"{settings.pool_name}/{own}" if settings.pool_name else own


def _file_name(settings: Settings, facts: BaseModelFacts, own: str) -> str:
    """For what is written for a replica: several bases and pools share a folder."""
    return "".join(letter if letter.isalnum() else "-" for letter in f"{facts.name}-{replica_name(settings, own)}")


def _vllm_settings(
    settings: Settings, facts: BaseModelFacts, data_folder: DataFolder, own: str, url: str
) -> VllmSettings:
    return VllmSettings(
        name=replica_name(settings, own),
        base_url=url,
        served_model=facts.name,
        base=replace(facts, context_length=settings.vllm_context_length or facts.context_length),
        zero_adapter=data_folder.path(f"zero-adapters/{_file_name(settings, facts, own)}"),
        max_lora_rank=settings.max_rank,
        max_loras=settings.vllm_max_loras,
        max_resident=settings.vllm_max_loras * RESIDENT_PER_SLOT,
        # Nobody knows how many the server of somebody else has.
        spare_places=0 if url else _OWN_SPARE_PLACES,
        api_key=settings.vllm_api_key,
        head_adapters=settings.vllm_head_adapters,
        prompt_tokens=settings.vllm_prompt_tokens,
    )


def _process_settings(
    settings: Settings, facts: BaseModelFacts, data_folder: DataFolder, own: str
) -> VllmProcessSettings:
    return VllmProcessSettings(
        command=settings.vllm_command or server_command(Path(".venv-vllm/bin/python").absolute()),
        model=facts.path,
        served_model=facts.name,
        log=data_folder.path(f"logs/{_file_name(settings, facts, own)}.log"),
        context_length=settings.vllm_context_length or facts.context_length,
        max_lora_rank=settings.max_rank,
        max_loras=settings.vllm_max_loras,
        # And the zero adapter.
        max_cpu_loras=settings.vllm_max_loras * RESIDENT_PER_SLOT + _OWN_SPARE_PLACES + 1,
        head_adapters=settings.vllm_head_adapters,
        dtype=settings.base_dtype,
        on_cpu=not has_accelerator(),
        tune_cpu=settings.vllm_tune_cpu,
        extra=settings.vllm_arguments,
        api_key=settings.vllm_api_key,
    )
