"""Sources of vLLM replicas: servers that somebody else runs, and servers that weft starts."""

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.secrets import mask_secrets
from engine.machine_memory import available_memory
from engine.sampling.replica import SamplerReplica
from engine.sampling.trainer_forward import TrainerForward
from engine.sampling.vllm.command import find_server_command
from engine.sampling.vllm.model_memory import ModelMemory, checkpoint_dtype
from engine.sampling.vllm.process import VllmProcess, VllmProcessSettings, has_accelerator, served_rank
from engine.sampling.vllm.replica import VllmReplica
from engine.sampling.vllm.served_length import served_length
from engine.sampling.vllm.server_memory import MemoryNeed, ServerMemory, batched_tokens, gpus_each, stages
from engine.sampling.vllm.settings import VllmReplicaSettings
from engine.sampling.vllm.target_modules import modules_beside_experts
from store.data_folder import DataFolder
from store.sampled_bases import takes_head
from store.settings import Settings

RESIDENT_PER_SLOT = 8
"""Most adapters that a server keeps resident for each adapter that fits into a batch (``vllm_max_loras``)."""
_RESIDENT_SHARE = 0.25
"""Share of the host memory left that resident adapters may take, of all servers that this process starts."""
_OWN_SPARE_PLACES = 1
"""Places for adapters beyond the resident ones, on servers that weft starts."""
_BESIDE_RESIDENT = _OWN_SPARE_PLACES + 1
"""Places beyond the resident ones: a spare one, and the zero adapter's."""
_SPEC = re.compile(r"((?P<base>.+?)=)?(?P<url>(https?://|unix:///)[^#]+?)/?(#(?P<name>(?!vllm-)[A-Za-z0-9_.-]{1,64}))?")
"""Form of an entry of ``vllm_urls``. Names that begin with ``vllm-`` are those of servers that weft starts."""

log = logging.getLogger(__name__)


class ReplicaSource(Protocol):
    """Source of one replica; makes another one when the replica has failed."""

    @property
    def name(self) -> str:
        """Name of the replica."""

    async def start(self) -> SamplerReplica:
        """Return a ready replica. Raises ``InvalidRequest`` if it can never be ready, ``EngineFailure`` if a retry may help."""

    async def stop(self) -> None:
        """Stop what ``start`` started, except the replica itself, which its user closes."""


@dataclass(frozen=True, slots=True)
class ExternalVllm:
    """Replica on a vLLM server that somebody else runs. ``forward`` scores the prompts that the server cannot score."""

    settings: VllmReplicaSettings
    forward: TrainerForward | None = None

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.settings.name

    async def start(self) -> SamplerReplica:
        """See ``ReplicaSource``."""
        log.info("replica %s is the vLLM server at %s", self.name, mask_secrets(self.settings.base_url))
        replica = VllmReplica(self.settings, self.forward)
        await replica.start()
        return replica

    async def stop(self) -> None:
        """Do nothing: the server keeps running."""


class ManagedVllm:
    """Replica on a vLLM server that weft starts and stops.

    ``settings`` has everything except the server's address, which each start chooses. ``forward`` scores the prompts that
    the server cannot score.
    """

    def __init__(
        self, settings: VllmReplicaSettings, process: VllmProcessSettings, forward: TrainerForward | None = None
    ) -> None:
        self.settings = settings
        self._forward = forward
        self.process_settings = process
        self._process: VllmProcess | None = None
        self._had: ServerMemory | None = None

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self.settings.name

    async def start(self) -> SamplerReplica:
        """See ``ReplicaSource``. A server of an earlier start is stopped first, and the next one may have its memory."""
        await self.stop()
        need = self.process_settings.need
        wished = None if need is None else replace(need, had=self._had)
        self._process = VllmProcess(replace(self.process_settings, need=wished))
        await self._process.start()
        if self._process.memory is not None:
            self._had = self._process.memory
        replica = VllmReplica(replace(self.settings, base_url=self._process.base_url), self._forward)
        await replica.start()
        return replica

    async def stop(self) -> None:
        """Stop the server."""
        if self._process is not None:
            await self._process.stop()


def vllm_sources(
    settings: Settings,
    facts: BaseModelFacts,
    data_folder: DataFolder,
    *,
    trains_here: bool,
    forward: TrainerForward | None = None,
) -> Sequence[ReplicaSource]:
    """Return sources of the vLLM servers that the settings name for a base model, maybe none.

    ``forward`` scores the prompts that servers with head adapters cannot score; None: such prompts are refused.
    ``trains_here``: this process trains on the settings' device, too, which its servers leave a part of.
    Raises ``InvalidRequest`` for an entry that is no ``[NAME=]URL[#REPLICA]``, for two replicas of one name, for a base that
    vLLM cannot serve with adapters, and where no vLLM is found to start.
    """
    servers = [server for server in vllm_servers(settings.vllm_urls) if server.base_model in (None, facts.name)]
    most = settings.vllm_max_loras * RESIDENT_PER_SLOT
    sources: list[ReplicaSource] = [
        ExternalVllm(_vllm_settings(settings, facts, data_folder, server.name, server.url, most), forward)
        for server in servers
    ]
    if not settings.vllm_replicas:
        return sources
    need, resident = _memory_need(settings, facts, most, trains_here=trains_here)
    sources += [
        ManagedVllm(
            _vllm_settings(settings, facts, data_folder, f"vllm-{number}", "", resident),
            _process_settings(settings, facts, data_folder, f"vllm-{number}", need, resident),
            forward,
        )
        for number in range(settings.vllm_replicas)
    ]
    return sources


@dataclass(frozen=True, slots=True)
class ExternalServer:
    """An entry of ``vllm_urls``. ``name`` is what tenants may read of it: the address is for operators only."""

    base_model: str | None
    url: str
    name: str


def vllm_servers(specs: Sequence[str]) -> list[ExternalServer]:
    """Return the servers of ``vllm_urls``, each given as ``[NAME=]URL[#REPLICA]``.

    A server without a replica name is called by its place, ``server-0`` and so on. Raises ``InvalidRequest`` for an entry
    of another form, and for two replicas of one name.
    """
    servers: list[ExternalServer] = []
    for place, spec in enumerate(specs):
        found = _SPEC.fullmatch(spec)
        if found is None:
            raise InvalidRequest(
                f"vllm_urls: entry {place} must be [NAME=]http://host:port, with #REPLICA after it to name the replica"
            )
        servers.append(ExternalServer(found["base"], found["url"], found["name"] or f"server-{place}"))
    names = [server.name for server in servers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidRequest(f"vllm_urls: {', '.join(twice)} names two replicas; write another #REPLICA after one URL")
    return servers


def replica_name(settings: Settings, own: str) -> str:
    """Return the replica's name with its pool's name before it: pools of a cluster may use the same ``own`` names."""
    return f"{settings.pool_name}/{own}" if settings.pool_name else own


def _file_name(settings: Settings, facts: BaseModelFacts, own: str) -> str:
    """Name of a replica's log, unique in a data folder that several base models and pools share."""
    return _plain(f"{facts.name}-{replica_name(settings, own)}")


def _folder_name(base_model: str) -> str:
    """Name of a base model's folder: no two names of bases become one."""
    return f"{_plain(base_model)[:100]}-{hashlib.sha256(base_model.encode()).hexdigest()[:12]}"


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _vllm_settings(
    settings: Settings, facts: BaseModelFacts, data_folder: DataFolder, own: str, url: str, resident: int
) -> VllmReplicaSettings:
    return VllmReplicaSettings(
        name=replica_name(settings, own),
        base_url=url,
        served_model=facts.name,
        base=replace(facts, context_length=settings.vllm_context_length or facts.context_length),
        # Every replica of a base writes the same bytes, and pools' names may change with each start.
        zero_adapter=data_folder.path(f"zero-adapters/{_folder_name(facts.name)}"),
        max_lora_rank=settings.max_rank,
        max_loras=settings.vllm_max_loras,
        max_resident=resident,
        # The places of a server that somebody else runs are unknown.
        spare_places=0 if url else _OWN_SPARE_PLACES,
        api_key=settings.vllm_api_key,
        head_adapters=takes_head(settings, facts),
        max_logprobs=_most_logprobs(settings),
        max_streams=settings.vllm_sequences,
        prompt_tokens=settings.vllm_prompt_tokens,
        folder=settings.data_dir,
        server_folder=settings.vllm_data_dir if url else None,
    )


def _process_settings(
    settings: Settings, facts: BaseModelFacts, data_folder: DataFolder, own: str, need: MemoryNeed, resident: int
) -> VllmProcessSettings:
    on_cpu = not has_accelerator()
    dtype = _dtype(settings, facts)
    if dtype == "float32" and not on_cpu:
        raise InvalidRequest(
            f"{facts.name} is of float32, and vLLM's adapters on an accelerator take half precision only: set "
            "WEFT_BASE_DTYPE=bfloat16, for the trainer and the samplers alike"
        )
    modules = modules_beside_experts(facts.path)
    if modules is not None and on_cpu:
        raise InvalidRequest(
            f"{facts.name} has routed experts, and vLLM computes those beside adapters on an accelerator only: leave out "
            "WEFT_VLLM_REPLICAS, and weft samples it by itself"
        )
    return VllmProcessSettings(
        command=settings.vllm_command or find_server_command(),
        model=facts.path,
        served_model=facts.name,
        log=data_folder.path(f"logs/{_file_name(settings, facts, own)}.log"),
        context_length=settings.vllm_context_length or facts.context_length,
        max_lora_rank=served_rank(settings.max_rank),
        max_loras=settings.vllm_max_loras,
        max_cpu_loras=resident + _BESIDE_RESIDENT,
        target_modules=modules,
        head_adapters=takes_head(settings, facts),
        max_logprobs=_most_logprobs(settings),
        dtype=dtype,
        need=need,
        max_sequences=settings.vllm_sequences,
        on_cpu=on_cpu,
        tune_cpu=settings.vllm_tune_cpu,
        extra=settings.vllm_arguments,
        api_key=settings.vllm_api_key,
        start_deadline_s=settings.vllm_start.total_seconds(),
    )


def _most_logprobs(settings: Settings) -> int:
    """Logprobs a token that a server must give: the likeliest ones that a tenant may ask for, and the drawn token's."""
    return settings.max_topk_logprobs + 1


def _dtype(settings: Settings, facts: BaseModelFacts) -> str:
    return checkpoint_dtype(facts.path) if settings.base_dtype == "auto" else settings.base_dtype


def _memory_need(settings: Settings, facts: BaseModelFacts, most: int, *, trains_here: bool) -> tuple[MemoryNeed, int]:
    """Return what each server needs, and how many adapters it keeps resident: ``most``, or as many as the host has memory for."""
    places, devices = settings.vllm_max_loras, gpus_each(settings.vllm_arguments)
    servers = settings.vllm_replicas * max(1, len(settings.base_models))
    model = ModelMemory.read(
        facts.path,
        dtype=_dtype(settings, facts),
        max_rank=served_rank(settings.max_rank),
        adapters=places,
        head=takes_head(settings, facts),
    )
    # Each of a server's processes, one for each of its GPUs, keeps them all.
    each = model.adapters // places * devices
    fit = int(available_memory() * _RESIDENT_SHARE / servers) // max(1, each) - _BESIDE_RESIDENT
    # Fewer than fit into a batch are of no use.
    resident = max(places, min(most, fit))
    if resident < most:
        log.warning("a vLLM server for %s keeps %d adapters resident, not %d: host memory", facts.name, resident, most)
    _, _, number = settings.device.partition(":")
    context = settings.vllm_context_length or facts.context_length
    need = MemoryNeed(
        model=model,
        context_length=max(context, served_length(facts.path, context)),
        sequences=settings.vllm_sequences,
        servers=servers,
        share=settings.vllm_memory_share,
        trainer_gpu=int(number or 0) if trains_here and settings.device != "cpu" else None,
        gpus_each=devices,
        stages=stages(settings.vllm_arguments),
        batched_tokens=batched_tokens(settings.vllm_arguments),
        # Beside adapters on the head, weft's own forward scores prompts.
        scores_prompts=not takes_head(settings, facts),
        resident=(resident + _BESIDE_RESIDENT) * each,
    )
    return need, resident
