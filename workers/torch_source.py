"""The replica source of a service without vLLM: it samples with torch in this process."""

from engine.model.base import BaseModel
from engine.sampling.in_process.replica import TorchReplica
from engine.sampling.replica import SamplerReplica
from store.settings import Settings
from workers.sampling.replica_sources import replica_name


class TorchSource:
    """A ``ReplicaSource`` over the base model that this process has loaded."""

    def __init__(self, base: BaseModel, settings: Settings) -> None:
        self._base = base
        self._settings = settings

    @property
    def name(self) -> str:
        """Name of the replica, by which its watcher finds it."""
        return replica_name(self._settings, f"torch:{self._base.facts.name}")

    async def start(self) -> SamplerReplica:
        """See ``ReplicaSource``."""
        replica = TorchReplica(
            self._base,
            name=self.name,
            max_sequences=self._settings.sampler_batch_sequences,
            max_adapters=self._settings.sampler_resident_adapters,
            stall_seconds=self._settings.stall_limit.total_seconds(),
            piece_seconds=self._settings.piece_time.total_seconds(),
        )
        await replica.start()
        return replica

    async def stop(self) -> None:
        """Do nothing: the replica ends with its process."""
