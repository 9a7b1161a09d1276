"""Pages of samples: those that ended last, and one with the weights behind each of its tokens."""

from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response

from api.dashboard.forms import see
from api.dashboard.rendering import large_page, page
from api.dashboard.tenant.token_pieces import TokenPiece, places_of, whole_pieces
from api.dashboard.web_session import PageSampleCaller, PageSampleReader
from api.json_body import PathId
from api.request_body import off_loop
from api.route_bounds import bounded
from api.services import ApiServices, Services
from api.tinker.futures import CancelRequest, cancel_future
from api.weft.sample_list import samples_page as read_samples
from api.weft.samples import SampleInfo, Sequence
from api.weft.samples import describe as describe_sample
from api.wire.request_model import NO_NUL
from contracts.errors import NotFound
from contracts.operations import SampleOutput
from contracts.sample_report import VersionSpan
from tenants.rights import Principal

router = APIRouter(prefix="/samples")

_SHOWN = 50
_MOST_TOKENS = 4096
"""Tokens that a page shows, of all its sequences: each is an element of the page."""


@dataclass(slots=True)
class _Shown:
    """A sequence as the page shows it. ``left_out``: tokens beyond those of ``spans``. ``pieces``: empty if unknown."""

    number: int
    stop_reason: str
    spans: list[VersionSpan]
    left_out: int
    pieces: list[TokenPiece] = field(default_factory=list)


@router.get("")
async def samples_page(
    caller: PageSampleReader,
    services: Services,
    request: Request,
    after: Annotated[str | None, Query(max_length=100, pattern=NO_NUL)] = None,
) -> Response:
    """Show a page of the samples that ended last."""
    found = await read_samples(caller, services, most=_SHOWN, after=after)
    return page(request, "tenant/samples.html", found=found, after=after)


@router.get("/{request_id}")
async def sample_page(
    caller: PageSampleReader,
    services: Services,
    request: Request,
    request_id: PathId,
    sequence: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
) -> Response:
    """Show how a sample was made, and its tokens as long as its result is kept.

    A page shows the sequences around number ``sequence``, and links to the others. Raises ``NotFound``.
    """
    report = await describe_sample(caller, services, request_id)
    windows = _windows(report)
    window = next((one for one in windows if sequence in one), None)
    if window is None:
        raise NotFound(f"sample {request_id} has no sequence {sequence}; it has {len(report.sequences)}")
    shown = [_shown(number, report.sequences[number - 1]) for number in window]
    await _add_pieces(caller, services, request_id, shown)
    return await large_page(
        request,
        caller,
        "tenant/sample.html",
        report=report,
        sequences=shown,
        window=window,
        windows=windows,
        facts={one.version: one for one in report.versions},
        places=places_of(one.pieces for one in shown),
    )


@router.post("/{request_id}/stop")
@bounded(goes_on=True)
async def stop(caller: PageSampleCaller, services: Services, request_id: PathId) -> Response:
    """End a sample that is drawn now."""
    await cancel_future(caller, services, CancelRequest(request_id=request_id))
    return see(f"/ui/samples/{quote(request_id)}")


def _windows(report: SampleInfo) -> list[range]:
    """Return the numbers of the sequences of each page: as many as ``_MOST_TOKENS`` allow, and one at least."""
    windows, tokens = [range(1, 1)], 0
    for number, sequence in enumerate(report.sequences, start=1):
        count = _length(sequence)
        if windows[-1] and tokens + count > _MOST_TOKENS:
            windows.append(range(number, number))
            tokens = 0
        windows[-1] = range(windows[-1].start, number + 1)
        tokens += count
    return windows


def _length(sequence: Sequence) -> int:
    return sequence.spans[-1].end if sequence.spans else 0


def _shown(number: int, sequence: Sequence) -> _Shown:
    spans = [
        VersionSpan(one.version, one.start, min(one.end, _MOST_TOKENS))
        for one in sequence.spans
        if one.start < _MOST_TOKENS
    ]
    return _Shown(number, sequence.stop_reason, spans, max(0, _length(sequence) - _MOST_TOKENS))


async def _add_pieces(caller: Principal, services: ApiServices, request_id: str, shown: list[_Shown]) -> None:
    """Add the tokens; none once the result is gone, or where the base has no tokenizer."""
    status = await services.runtime.ledger.status(caller.tenant, request_id)
    sampler = await services.batched_reads.samplers.standing(caller.reach, status.lane)
    vocabulary = services.vocabularies.get(sampler.base_model)
    decode = None if vocabulary is None else vocabulary.decode
    if decode is None:
        return
    result = await services.runtime.ledger.result(caller.tenant, status)
    if not isinstance(result, SampleOutput):
        return
    for one in shown:
        sequence = result.sequences[one.number - 1]
        size = 64 * min(len(sequence.tokens), _MOST_TOKENS)
        one.pieces = await off_loop(services, caller.tenant, size, whole_pieces, decode, sequence, one.spans)
