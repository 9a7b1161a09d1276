"""Weights that a sample draws from: a pinned version, the newest version of a followed run, or the bare base."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.ids import RunId
from contracts.ledger_records import ReadyOperation
from engine.sampling.replica import AdapterVersion
from ledger.runtime import Runtime
from tenants.sampled_versions import SampledVersion, held_versions, sampled_versions, versions_followed
from tenants.samplers import Staleness, SwapPolicy


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Weights that a sampler stands for at one moment."""

    run: RunId | None
    """Run that the version belongs to, None for the bare base."""
    version: AdapterVersion | None
    """None: the bare base."""
    is_live: bool
    """True: the sampler follows its run's newest version. False: it is pinned."""
    publication: int = 0
    """Number of the version among those that the sampler has followed."""
    staleness: Staleness | None = None
    """Bound on the age of a live sampler's samples; None: no bound."""
    swap_policy: SwapPolicy | None = None
    """Fate of a live sampler's samples in flight at a publication; None: as the service's setting says."""

    @property
    def name(self) -> str | None:
        """Name of the version, None for the bare base."""
        return None if self.version is None else self.version.name


class WeightSources:
    """Reader of samplers' weight sources."""

    def __init__(self, runtime: Runtime) -> None:
        self._database = runtime.database
        self._data_folder = runtime.data_folder
        self._clock = runtime.clock

    async def current(self, operation: ReadyOperation) -> WeightSource:
        """Return the weights that the sample's sampler stands for now.

        Raises ``NotFound`` when the sampler or its checkpoint is gone.
        """
        async with self._database.read() as session:
            (sampled,) = await sampled_versions(session, [(operation.tenant, operation.lane)], self._clock)
        if isinstance(sampled, NotFound):
            raise sampled
        return self._source(sampled)

    async def hold(
        self, transaction: AsyncSession, operations: Sequence[ReadyOperation]
    ) -> list[WeightSource | NotFound | None]:
        """Return the weights of each sample, in order. Until the transaction ends, no version is published to their samplers.

        None stands for a sampler that another transaction has locked. It is not waited for.
        """
        samplers = [(operation.tenant, operation.lane) for operation in operations]
        sampled = await held_versions(transaction, samplers, self._clock)
        return [self._source(found) if isinstance(found, SampledVersion) else found for found in sampled]

    async def followed(self, samplers: Sequence[str]) -> Mapping[str, WeightSource]:
        """Return the weights of live samplers by the sampler's id. Samplers whose version is gone are left out."""
        async with self._database.read() as session:
            found = await versions_followed(session, samplers, self._clock)
        return {sampler: self._source(sampled) for sampler, sampled in found.items()}

    def _source(self, sampled: SampledVersion) -> WeightSource:
        version = None
        if sampled.checkpoint is not None and sampled.directory is not None:
            version = AdapterVersion(name=sampled.checkpoint, directory=self._data_folder.path(sampled.directory))
        return WeightSource(
            sampled.run, version, sampled.is_live, sampled.publications, sampled.staleness, sampled.swap_policy
        )
