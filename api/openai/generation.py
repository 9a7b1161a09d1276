"""Run of an OpenAI request: its samples are accepted into the ledger, followed, and read once they have ended."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import ParamSpec, TypeVar
from uuid import uuid4

from fastapi import Request
from sqlalchemy.ext.asyncio import AsyncSession

from api.followed_sample import FollowedSample, all_followed
from api.openai.models import SESSION, NamedModel, version_of_run
from api.openai.sample_request import sample_request
from api.request_body import off_loop
from api.sample_submission import SampleSubmission
from api.services import ApiServices
from api.shared_reads import Purpose, shared_read
from api.wire.openai_requests import GenerationRequest
from api.wire.trajectory import trajectory_of
from contracts.base_model import BaseModelFacts
from contracts.codec import request_digest
from contracts.errors import BudgetSpent, EngineFailure, InvalidRequest, SequenceConflict, StaleSample, WeftError
from contracts.ids import RunId, SamplerId, SessionId
from contracts.ledger_records import OperationState, OperationStatus
from contracts.operations import OperationKind, SampledSequence, SampleOutput, SampleRequest
from contracts.paths import parse_path
from contracts.rate_lines import RateLine
from contracts.vocabulary import BaseVocabulary
from ledger.token_feed import TokensMade
from ledger.wakeups import versions_topic
from store.settings import Settings
from tenants.audit_tally import Repeated
from tenants.budgets import refusal
from tenants.project_limits import spent_and_limits
from tenants.rate_lines import lines_of
from tenants.rates import Meter
from tenants.reach import default_project
from tenants.rights import Principal
from tenants.samplers import NewSampler, create_sampler, lock_unless_at, point_sampler
from tenants.sessions import standing_session

P = ParamSpec("P")
T = TypeVar("T")

_BYTES_OF_WORK = 64
"""Bytes of JSON whose parsing takes as long as to turn one token into text."""
_MOST_PROMPTS = 128
"""Most prompts of one request."""


class _Signal(Enum):
    """Marks in the queue of a stream, between its tokens."""

    SILENCE = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Generation:
    """Samples of one request: one for each prompt, with ``n`` sequences each. ``decode`` turns tokens into text."""

    services: ApiServices
    caller: Principal
    model: NamedModel
    vocabulary: BaseVocabulary
    decode: Callable[[list[int]], str]
    asked: GenerationRequest
    prompts: list[list[int]]
    samples: list[FollowedSample]

    @property
    def id(self) -> str:
        """Request id of the first sample; ``/api/v1/samples/{id}`` reports on it."""
        return self.samples[0].request_id

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts together."""
        return sum(map(len, self.prompts))

    async def off_loop(self, tokens: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``function``'s result; it runs on a thread if it has many ``tokens`` to turn into text."""
        size = tokens * (1 + self.asked.alternatives) * _BYTES_OF_WORK
        return await off_loop(self.services, self.caller.tenant, size, function, *args, **kwargs)

    async def outputs(self) -> list[SampleOutput]:
        """Wait for the end of all samples and return their results in order. Raises the error of a sample that failed."""
        return [await _output(sample) for sample in self.samples]

    async def sequences(self) -> list[SampledSequence]:
        """Wait for the end of all samples and return their sequences in order. Raises as ``outputs``."""
        return [sequence for output in await self.outputs() for sequence in output.sequences]

    async def parts(self) -> AsyncIterator[tuple[int, TokensMade] | None]:
        """Yield each new piece of a sequence with the sequence's place among all; yield None after some silence.

        Tokens that were made before this request listened come at the end of their sequence. Raises as ``outputs``.
        """
        queue: asyncio.Queue[tuple[int, TokensMade] | WeftError | _Signal] = asyncio.Queue()

        async def follow_all() -> None:
            try:
                await asyncio.gather(*(self._follow(number, queue) for number in range(len(self.samples))))
            except WeftError as error:
                queue.put_nowait(error)
            finally:
                queue.put_nowait(_Signal.END)

        following = asyncio.create_task(follow_all())
        try:
            while (part := await queue.get()) is not _Signal.END:
                if isinstance(part, WeftError):
                    raise part
                yield None if isinstance(part, _Signal) else part
            await following
        finally:
            following.cancel()

    async def _follow(self, number: int, queue: "asyncio.Queue[tuple[int, TokensMade] | WeftError | _Signal]") -> None:
        sample, first = self.samples[number], number * self.asked.n
        said: dict[int, list[int]] = {}
        async for made in sample.tokens():
            if not made:
                queue.put_nowait(_Signal.SILENCE)
            for part in made:
                queue.put_nowait((first + part.sequence, _unsaid(part, said.setdefault(part.sequence, []))))
        for sequence, whole in enumerate((await _output(sample)).sequences):
            all_of_it = TokensMade(sequence, 0, None, whole.tokens.tolist(), whole.logprobs.tolist())
            queue.put_nowait((first + sequence, _unsaid(all_of_it, said.setdefault(sequence, []), is_last=True)))


@asynccontextmanager
async def generation(
    services: ApiServices,
    caller: Principal,
    request: Request,
    asked: GenerationRequest,
    *,
    prompts: Sequence[Sequence[int] | str],
    model: NamedModel,
) -> AsyncIterator[Generation]:
    """Accept the samples of ``asked`` and follow them; a repeat with the same ``Idempotency-Key`` finds the first ones.

    Raises ``InvalidRequest``, ``SequenceConflict``, ``TooManySamples``, ``OverRate``, ``BudgetSpent``, ``TenantHeld``.
    """
    asked.check_offered()
    vocabulary = services.vocabularies[model.base_model]
    decode = _decoder(vocabulary, model.base_model)
    if not 0 < len(prompts) <= _MOST_PROMPTS:
        raise InvalidRequest(f"prompt must hold 1 to {_MOST_PROMPTS} prompts; got {len(prompts)}")
    facts, settings = services.sampled_base(model.base_model), services.runtime.settings
    # Biases and forms may be large beside a short prompt.
    size = max(len(asked.sent), sum(map(len, prompts)))
    tokens, samples, digest = await off_loop(
        services, caller.tenant, size, _samples, asked, prompts, facts=facts, vocabulary=vocabulary, settings=settings
    )
    trajectory = trajectory_of(request, asked.prompt_cache_key, name="prompt_cache_key")
    unpaid, lines = await _bounds(services, caller)
    obstacle = caller.obstacle_of_work(model.base_model) or caller.held or unpaid
    given = request.headers.get("idempotency-key")
    if obstacle is not None and given is None:
        raise obstacle
    sampler = await _sampler(services, caller, model)
    key = given or uuid4().hex
    read = _shared_read(caller, model)
    submissions = [
        SampleSubmission(
            caller.tenant,
            sampler,
            _number(f"{key}/{place}"),
            model.base_model,
            replace(sample, trajectory=trajectory),
            digest,
            obstacle=obstacle,
            may_return=given is not None,
            may_wait=False,
            lines=lines,
            read=read,
        )
        for place, sample in enumerate(samples)
    ]
    async with _named_by_key(all_followed(services, submissions)) as followers:
        yield Generation(services, caller, model, vocabulary, decode, asked, tokens, followers)


@asynccontextmanager
async def _named_by_key(following: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter ``following``; of a repeat with another body tell the key that its client has sent, and not what is made of it."""
    async with AsyncExitStack() as stack:
        try:
            followers = await stack.enter_async_context(following)
        except SequenceConflict:
            raise SequenceConflict(
                "this Idempotency-Key was used before with another body; choose a new one for each request"
            ) from None
        yield followers


def _decoder(vocabulary: BaseVocabulary, base_model: str) -> Callable[[list[int]], str]:
    """Return the function that turns tokens into text. Raises ``InvalidRequest`` for a base model without a tokenizer."""
    if vocabulary.decode is None:
        raise InvalidRequest(f"model: {base_model} has no tokenizer, so no text; use the Tinker API")
    return vocabulary.decode


async def _bounds(services: ApiServices, caller: Principal) -> tuple[BudgetSpent | None, tuple[RateLine, ...]]:
    """Return the error of work that is not paid for, and the rates of the caller's key and project."""
    project = caller.home_project
    async with services.runtime.database.read() as session:
        now = services.runtime.clock()
        spent, limits = await spent_and_limits(session, caller.tenant, project, now)
    unpaid = refusal(spent, caller.payer, project or default_project(caller.tenant), now)
    return unpaid, lines_of(caller, Meter.SAMPLE, project, limits)


def _shared_read(caller: Principal, model: NamedModel) -> Repeated | None:
    if model.shared_by is None or model.path is None:
        return None
    return shared_read(caller, model.shared_by, parse_path(model.path), Purpose.SAMPLE)


def _samples(
    asked: GenerationRequest,
    prompts: Sequence[Sequence[int] | str],
    *,
    facts: BaseModelFacts,
    vocabulary: BaseVocabulary,
    settings: Settings,
) -> tuple[list[list[int]], list[SampleRequest], bytes]:
    """Return the tokens and the sample of each prompt, and the digest of the request. Raises ``InvalidRequest``."""
    tokens = [_encoded(vocabulary, facts, prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    samples = [sample_request(asked, prompt, facts, vocabulary, settings) for prompt in tokens]
    return tokens, samples, request_digest(OperationKind.SAMPLE, asked.sent)


def _encoded(vocabulary: BaseVocabulary, facts: BaseModelFacts, text: str) -> list[int]:
    """Return the tokens of ``text``. Raises ``InvalidRequest`` for a base model without a tokenizer."""
    if vocabulary.encode is None:
        raise InvalidRequest("prompt: this base model has no tokenizer; send token ids instead of text")
    check_text_length(len(text), "prompt", vocabulary, facts)
    return vocabulary.encode(text)


def check_text_length(length: int, field: str, vocabulary: BaseVocabulary, facts: BaseModelFacts) -> None:
    """Raise ``InvalidRequest`` for a text of ``length`` characters that no tokens could bring into the context."""
    most = facts.context_length * vocabulary.longest_token
    if length > most:
        raise InvalidRequest(
            f"{field} has {length} characters; the context of {facts.name} holds {facts.context_length} tokens, which are "
            f"at most {most}: shorten it"
        )


async def _sampler(services: ApiServices, caller: Principal, model: NamedModel) -> SamplerId:
    """Return the caller's standing sampler of the model.

    The sampler of a run follows the version of ``tenants.followed_versions``.
    """
    async with services.runtime.database.write() as transaction:
        session_id: SessionId = await standing_session(
            transaction, caller.tenant, SESSION, services.runtime.clock, project=caller.home_project
        )
        # A path can be overwritten: each version has a sampler of its own.
        number = _number(model.name if model.run is not None else f"{model.name}/{model.version}")
        new = NewSampler(session_id, number, model.base_model, model.path, model.version, model.run)
        sampler_id = await create_sampler(transaction, caller.tenant, new, services.runtime.clock)
        if model.run is not None:
            await _follow(services, transaction, caller, model.run, sampler_id, model.base_model)
        return sampler_id


async def _follow(
    services: ApiServices, transaction: AsyncSession, caller: Principal, run: RunId, sampler: SamplerId, base_model: str
) -> None:
    """Point the caller's standing sampler at the version of its run that is to be followed."""
    if await lock_unless_at(transaction, sampler, await version_of_run(services, transaction, caller, run)):
        # Read again under the lock: a version published meanwhile must not be replaced by an older one.
        version = await version_of_run(services, transaction, caller, run)
        if await point_sampler(transaction, sampler, version):
            services.runtime.ledger.wakeups.announce_after_commit(transaction, versions_topic(base_model))


def _unsaid(part: TokensMade, said: list[int], *, is_last: bool = False) -> TokensMade:
    """Return the tokens of ``part`` that come after ``said``, and append them to it.

    Raises ``StaleSample`` if the sample has begun anew and says something else now.
    """
    known = said[part.start : part.start + len(part.tokens)]
    if part.tokens[: len(known)] != known or (is_last and len(known) < len(said)):
        raise StaleSample("the sample began anew, so the text that was streamed is void; send the request again")
    said += part.tokens[len(known) :]
    new = slice(len(known), None)
    return TokensMade(part.sequence, part.start + len(known), part.version, part.tokens[new], part.logprobs[new])


async def _output(sample: FollowedSample) -> SampleOutput:
    status = await sample.status()
    if status.state is OperationState.FAILED:
        raise _failure(status)
    return await sample.output()


def _failure(status: OperationStatus) -> WeftError:
    message = status.error_message or "the sample failed; send the request again"
    return InvalidRequest(message) if status.error_category == "user" else EngineFailure(message)


def _number(text: str) -> int:
    """Return a number of 62 bits derived from ``text`` alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2
