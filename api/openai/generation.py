"""From an OpenAI request to samples in the ledger, and what became of them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from uuid import uuid4

from fastapi import Request

from api.followed_sample import FollowedSample, followed
from api.openai.models import SESSION, NamedModel, followed_version, named_model
from api.openai.schemas import GenerationRequest
from api.services import ApiServices
from api.wire.sampling_codec import sample_request
from api.wire.schemas import AsampleRequest, Chunk, JsonSamplingParams, ModelInput
from contracts.codec import digest
from contracts.errors import EngineFailure, InvalidRequest, StaleSample, WeftError
from contracts.ids import SamplerId, SessionId, TenantId
from contracts.ledger_records import NewOperation, OperationState, OperationStatus
from contracts.operations import OperationKind, SampledSequence, SampleRequest
from contracts.vocabulary import BaseVocabulary
from ledger.token_feed import TokensMade
from telemetry.context import current_work
from tenants.samplers import NewSampler, create_sampler, point_sampler
from tenants.sessions import standing_session

_MOST_PROMPTS = 128


class _Signal(Enum):
    """Between the tokens of a stream."""

    SILENCE = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Generation:
    """Samples of one request, a prompt each, ``n`` sequences of each. ``topk`` alternatives a token are asked for."""

    model: NamedModel
    vocabulary: BaseVocabulary
    asked: GenerationRequest
    prompts: list[list[int]]
    samples: list[FollowedSample]

    @property
    def id(self) -> str:
        """That of the first sample: ``/api/v1/samples/{id}`` tells how it came about."""
        return self.samples[0].request_id

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    def decode(self, tokens: list[int]) -> str:
        """Their text. Raises ``InvalidRequest`` for a base without a tokenizer."""
        if self.vocabulary.decode is None:
            raise InvalidRequest("this base model has no tokenizer: its samples have no text; use the Tinker API")
        return self.vocabulary.decode(tokens)

    async def sequences(self) -> list[SampledSequence]:
        """Every sequence of every prompt, in order, once all have ended. Raises the error that ended one."""
        found: list[SampledSequence] = []
        for sample in self.samples:
            found += await _sequences(sample)
        return found

    async def parts(self) -> AsyncIterator[tuple[int, TokensMade] | None]:
        """Tokens of the sequences by their place among all, as they are made; None after some silence.

        What nobody streamed (made while no one listened) comes at the end of its sequence. Raises as ``sequences``.
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
        said: dict[int, int] = {}
        async for made in sample.tokens():
            if not made:
                queue.put_nowait(_Signal.SILENCE)
            for part in made:
                if part.start < said.get(part.sequence, 0):
                    raise StaleSample("the sample was begun again on a newer version; what was streamed is void")
                said[part.sequence] = part.start + len(part.tokens)
                queue.put_nowait((first + part.sequence, part))
        for sequence, whole in enumerate(await _sequences(sample)):
            start = said.get(sequence, 0)
            rest = TokensMade(sequence, start, None, whole.tokens[start:].tolist(), whole.logprobs[start:].tolist())
            queue.put_nowait((first + sequence, rest))


@asynccontextmanager
async def generation(
    services: ApiServices,
    caller: TenantId,
    request: Request,
    asked: GenerationRequest,
    *,
    prompts: Sequence[Sequence[int] | str],
    max_tokens: int | None,
    topk: int,
    model: NamedModel,
) -> AsyncIterator[Generation]:
    """Accept the samples of ``asked`` and follow them. A repeat with the same ``Idempotency-Key`` finds the earlier ones.

    Raises ``InvalidRequest``, ``SequenceConflict``.
    """
    asked.check_offered()
    vocabulary = services.vocabularies[model.base_model]
    if not 0 < len(prompts) <= _MOST_PROMPTS:
        raise InvalidRequest(f"prompt: 1 to {_MOST_PROMPTS} prompts, not {len(prompts)}")
    tokens = [encoded(vocabulary, prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    payloads = [_payload(services, asked, model, vocabulary, prompt, max_tokens, topk) for prompt in tokens]
    lane = await _sampler(services, caller, model)
    key = request.headers.get("idempotency-key") or uuid4().hex
    operations = [
        NewOperation(
            tenant=caller,
            lane=lane,
            seq_id=_number(f"{key}/{number}"),
            kind=OperationKind.SAMPLE,
            base_model=model.base_model,
            payload=payload,
            digest=digest(payload),
            tokens=len(payload.prompt),
            trace_id=current_work().trace_id,
        )
        for number, payload in enumerate(payloads)
    ]
    async with AsyncExitStack() as stack:
        samples = [await stack.enter_async_context(followed(services, caller, one, None)) for one in operations]
        yield Generation(model, vocabulary, asked, tokens, samples)


def _payload(
    services: ApiServices,
    asked: GenerationRequest,
    model: NamedModel,
    vocabulary: BaseVocabulary,
    prompt: list[int],
    max_tokens: int | None,
    topk: int,
) -> SampleRequest:
    params = JsonSamplingParams(
        max_tokens=max_tokens,
        seed=asked.seed,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=asked.stops or None,
    )
    sample = AsampleRequest(
        num_samples=asked.n,
        prompt=ModelInput(chunks=[Chunk(tokens=prompt)]),
        sampling_params=params,
        topk_sample_logprobs=topk,
    )
    payload = sample_request(sample, services.base(model.base_model), services.settings)
    if not asked.stops:
        return payload
    # OpenAI's stop strings come beside the model's own end, the Tinker API's in its place.
    ends = sorted(vocabulary.end_of_sequence_ids)
    return replace(payload, params=replace(payload.params, stop_tokens=ends))


async def resolve(services: ApiServices, caller: TenantId, name: str) -> tuple[NamedModel, BaseVocabulary]:
    """What ``model`` names, and its base's vocabulary. Raises as ``named_model``."""
    model = await named_model(services, caller, name)
    return model, services.vocabularies[model.base_model]


def encoded(vocabulary: BaseVocabulary, text: str) -> list[int]:
    """``text`` as tokens. Raises ``InvalidRequest`` for a base without a tokenizer."""
    if vocabulary.encode is None:
        raise InvalidRequest("prompt: this base model has no tokenizer; give token ids instead of text")
    return vocabulary.encode(text)


async def _sampler(services: ApiServices, caller: TenantId, model: NamedModel) -> SamplerId:
    """The standing sampler of the model: one of a run follows what the run has published, or else its newest version."""
    async with services.database.write() as transaction:
        session_id: SessionId = await standing_session(transaction, caller, SESSION, services.clock)
        # A path can be written anew: another version is another sampler.
        number = _number(model.name if model.run is not None else f"{model.name}/{model.version}")
        new = NewSampler(session_id, number, model.base_model, model.path, model.version, model.run)
        sampler_id = await create_sampler(transaction, caller, new, services.clock)
        if model.run is not None:
            # Read again: one that was published since must not be taken back.
            version = await followed_version(services, transaction, caller, model.run)
            if await point_sampler(transaction, sampler_id, version):
                services.ledger.announce_versions(transaction, model.base_model)
        return sampler_id


async def _sequences(sample: FollowedSample) -> list[SampledSequence]:
    status = await sample.status()
    if status.state is OperationState.FAILED:
        raise _failure(status)
    return (await sample.output()).sequences


def _failure(status: OperationStatus) -> WeftError:
    message = status.error_message or "the sample failed"
    return InvalidRequest(message) if status.error_category == "user" else EngineFailure(message)


def _number(text: str) -> int:
    """A number of 62 bits that ``text`` always has."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2
