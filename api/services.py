"""What the endpoints work with, composed once by whoever starts the process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from fastapi import Depends, Request

from contracts.base_model import BaseModelFacts
from contracts.errors import UnknownBaseModel
from contracts.ids import TenantId
from contracts.vocabulary import BaseVocabulary
from ledger.ledger import Ledger
from ledger.publication import Publication
from ledger.sample_intake import SampleIntake
from ledger.token_feed import TokenFeed
from store.clock import Clock
from store.data_folder import DataFolder
from store.database import Database
from store.settings import Settings
from telemetry.context import note_tenant
from telemetry.readiness import Readiness
from telemetry.telemetry import Telemetry
from tenants.keys import KeyReader
from tenants.samplers import SamplerReader


@dataclass(frozen=True, slots=True)
class BatchedReads:
    """What many requests ask of the database at once, each kind on one connection: a flood of them leaves the others free."""

    keys: KeyReader
    samplers: SamplerReader
    samples: SampleIntake

    @classmethod
    def over(cls, settings: Settings, database: Database, ledger: Ledger, clock: Clock, telemetry: Telemetry) -> Self:
        """All of them."""
        most = settings.max_pending_samples
        samples = SampleIntake(database, ledger, clock, telemetry, most_pending=most)
        return cls(KeyReader(database), SamplerReader(database, clock), samples)


@dataclass(frozen=True, slots=True)
class ApiServices:
    """The parts of one API process. ``bases`` and ``vocabularies`` are by served name."""

    settings: Settings
    database: Database
    batched_reads: BatchedReads
    ledger: Ledger
    clock: Clock
    data_folder: DataFolder
    bases: Mapping[str, BaseModelFacts]
    vocabularies: Mapping[str, BaseVocabulary]
    feed: TokenFeed
    publication: Publication
    telemetry: Telemetry
    readiness: Readiness

    def base(self, name: str) -> BaseModelFacts:
        """The served base of that name. Raises ``UnknownBaseModel``; never falls back to another."""
        try:
            return self.bases[name]
        except KeyError:
            served = ", ".join(sorted(self.bases)) or "none"
            raise UnknownBaseModel(f"base_model {name[:300]!r} is not served here; served: {served}") from None


async def get_services(request: Request) -> ApiServices:
    """The services of the app that handles ``request``."""
    services: ApiServices = request.app.state.services
    return services


Services = Annotated[ApiServices, Depends(get_services)]


async def get_caller(request: Request, services: Services) -> TenantId:
    """The tenant whose key came in ``X-API-Key``, or as a bearer token. Raises ``Unauthenticated``."""
    secret = request.headers.get("x-api-key") or _bearer(request.headers.get("authorization", ""))
    tenant = await services.batched_reads.keys.authenticate(secret)
    note_tenant(tenant)
    return tenant


def _bearer(authorization: str) -> str | None:
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


Caller = Annotated[TenantId, Depends(get_caller)]
