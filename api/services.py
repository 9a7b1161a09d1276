"""The record of everything the endpoints work with, composed once by the command that starts the process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from fastapi import Depends, Request

from api.admission import Admission
from api.departures import Departures
from api.tokenizer_repositories import TokenizerRepository, tokenizer_repositories
from api.waiting_polls import WaitingPolls
from contracts.base_model import BaseModelFacts
from contracts.errors import UnknownBaseModel
from contracts.vocabulary import BaseVocabulary
from ledger.ended_keys import EndedKeys
from ledger.runtime import Runtime
from ledger.sample_intake import SampleIntake
from ledger.training_intake import TrainingIntake
from ledger.waiting import Waits
from store.sampled_bases import sampled_facts
from telemetry.readiness import Readiness
from tenants.audit_tally import AuditTally
from tenants.key_reader import KeyReader
from tenants.key_uses import KeyUses
from tenants.limits import Limits
from tenants.rights import Principal
from tenants.samplers import SamplerReader
from tenants.signed_tokens import TokenSigner
from tenants.web_sessions import WebSessionReader


@dataclass(frozen=True, slots=True)
class BatchedReads:
    """Database reads that many requests make at the same moment, batched by kind.

    Each kind uses one connection at a time, so that a flood of one kind leaves connections for the rest.
    """

    keys: KeyReader
    samplers: SamplerReader
    web_sessions: WebSessionReader


@dataclass(frozen=True, slots=True)
class ApiServices:
    """Parts of one API process. ``bases`` and ``vocabularies`` are keyed by the base model's served name."""

    runtime: Runtime
    batched_reads: BatchedReads
    sample_intake: SampleIntake
    training_intake: TrainingIntake
    bases: Mapping[str, BaseModelFacts]
    vocabularies: Mapping[str, BaseVocabulary]
    readiness: Readiness
    limits: Limits
    """Limits of a tenant without values of its own."""
    ended_keys: EndedKeys
    departures: Departures
    admission: Admission
    tokenizers: Mapping[str, TokenizerRepository]
    """Tokenizer files by the ids that clients ask a hub for."""
    signer: TokenSigner
    key_uses: KeyUses
    waits: Waits
    waiting_polls: WaitingPolls
    audit_tally: AuditTally

    @classmethod
    def over(
        cls,
        runtime: Runtime,
        bases: Mapping[str, BaseModelFacts],
        vocabularies: Mapping[str, BaseVocabulary],
        readiness: Readiness,
    ) -> Self:
        """Compose the services of a process that serves ``bases``."""
        database, clock = runtime.database, runtime.clock
        defaults = Limits.of(runtime.settings)
        signer = TokenSigner(runtime.data_folder, clock)
        intake = SampleIntake(database, runtime.ledger, clock, runtime.telemetry, defaults=defaults)
        uses = KeyUses(database)
        web_sessions = WebSessionReader(database, clock, uses, idle=runtime.settings.web_session_idle)
        reads = BatchedReads(KeyReader(database, signer, clock, uses), SamplerReader(database, clock), web_sessions)
        hold = runtime.settings.poll_hold.total_seconds()
        training = TrainingIntake(database, runtime.ledger, defaults=defaults, hold_seconds=hold)
        ended_keys, departures = EndedKeys(database, runtime.ledger, clock), Departures(runtime)
        admission = Admission(runtime.settings)
        if runtime.database.surveys is not None:
            runtime.database.surveys.charge = admission.loop_time.charge_tenant
        return cls(
            runtime,
            reads,
            intake,
            training,
            bases,
            vocabularies,
            readiness,
            defaults,
            ended_keys,
            departures,
            admission,
            tokenizer_repositories(bases),
            signer,
            uses,
            Waits(database, runtime.settings, runtime.data_folder, clock),
            WaitingPolls(database, runtime.wakeups, clock),
            AuditTally(database, clock),
        )

    def limits_of(self, caller: Principal) -> Limits:
        """Return the limits of the caller's tenant, as they were read with its key."""
        return self.limits.with_own(caller.tenant_limits)

    def base(self, name: str) -> BaseModelFacts:
        """Return the facts of the served base model ``name``. Raises ``UnknownBaseModel``; never falls back to another."""
        try:
            return self.bases[name]
        except KeyError:
            served = ", ".join(sorted(self.bases)) or "none"
            raise UnknownBaseModel(f"base_model {name[:300]!r} is not served here; choose one of: {served}") from None

    def sampled_base(self, name: str) -> BaseModelFacts:
        """Return the facts of a served base model as it is sampled. Raises ``UnknownBaseModel``."""
        return sampled_facts(self.runtime.settings, self.base(name))


async def get_services(request: Request) -> ApiServices:
    """Return the services of the application that handles ``request``."""
    services: ApiServices = request.app.state.services
    return services


Services = Annotated[ApiServices, Depends(get_services)]
