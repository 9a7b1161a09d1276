"""The playground's samples: accepted as an OpenAI request's are, streamed token by token with versions and texts."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict
from typing import Any

from api.dashboard.events import PageEvent
from api.dashboard.tenant.token_pieces import PieceReader, TokenPiece, whole_pieces
from api.openai.generation import Generation
from api.weft.samples import SampleInfo, UsedVersion, used_version
from api.weft.samples import describe as describe_sample
from contracts.errors import WeftError
from contracts.sample_report import VersionSpan
from tenants.version_facts import version_facts


async def answer_of(made: Generation) -> dict[str, Any]:
    """Wait for the sample's end and return its report with every token. Raises the error of a sample that failed."""
    (sequence,) = await made.sequences()
    report = await describe_sample(made.caller, made.services, made.id)
    pieces = await made.off_loop(
        len(sequence.tokens), whole_pieces, made.decode, sequence, spans_of(report, len(sequence.tokens))
    )
    return {
        "request_id": made.id,
        "model": made.model.name,
        "stop_reason": sequence.stop_reason,
        "prompt_tokens": made.prompt_tokens,
        "tokens": pieces,
        "versions": report.versions,
        "attempts": report.attempts,
        "queue_seconds": report.queue_seconds,
        "decode_seconds": report.decode_seconds,
    }


def spans_of(report: SampleInfo, tokens: int) -> list[VersionSpan]:
    """Return the spans of the report's first sequence."""
    if not report.sequences:
        return [VersionSpan(None, 0, tokens)]
    return [VersionSpan(span.version, span.start, span.end) for span in report.sequences[0].spans]


async def stream_events(opened: AbstractAsyncContextManager[Generation]) -> AsyncGenerator[PageEvent, None]:
    """Yield ``accepted``, then ``version`` and ``tokens`` as they come, then ``done`` or ``error``.

    The first event is made once the sample is accepted. Raises the error that refuses it.
    """
    async with opened as made:
        accepted = {"request_id": made.id, "model": made.model.name, "run": made.model.run}
        yield PageEvent("accepted", {**accepted, "prompt_tokens": made.prompt_tokens})
        try:
            async with aclosing(_tokens(made)) as events:
                async for event in events:
                    yield event
            answer = await answer_of(made)
            yield await made.off_loop(len(answer["tokens"]), _done, answer)
        except WeftError as error:
            yield PageEvent("error", {"error": error.message, "code": error.code})


async def _tokens(made: Generation) -> AsyncGenerator[PageEvent, None]:
    reader, known = PieceReader(made.decode), set[str]()
    async for part in made.parts():
        if part is None:
            continue
        _, new = part
        if new.version is not None and new.version not in known:
            known.add(new.version)
            if (found := await _version(made, new.version)) is not None:
                yield PageEvent("version", found.model_dump(mode="json"))
        if new.tokens:
            pieces = await made.off_loop(len(new.tokens), reader.push, new.tokens, new.logprobs, new.version)
            yield PageEvent("tokens", {"tokens": [_piece(piece) for piece in pieces]})


async def _version(made: Generation, version: str) -> UsedVersion | None:
    """Return the facts of a version, None for one that was deleted or is another tenant's."""
    async with made.services.runtime.database.read() as session:
        found = await version_facts(session, made.caller.reach, [version])
    return used_version(found[version]) if version in found else None


def _done(answer: dict[str, Any]) -> PageEvent:
    told = {**answer, "tokens": [_piece(piece) for piece in answer["tokens"]]}
    told["versions"] = [version.model_dump(mode="json") for version in answer["versions"]]
    return PageEvent("done", told)


def _piece(piece: TokenPiece) -> dict[str, Any]:
    return asdict(piece)
