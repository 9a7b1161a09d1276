"""Sample progress: the tokens of a sample that is not finished, handed from one sampling process to the next."""

from dataclasses import dataclass

import msgspec

from contracts.codec import decode_result, encode
from contracts.operations import OperationKind, SampleOutput, SampleRequest
from contracts.sample_report import SampleReport, decode_report, encode_report


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """Tokens so far, and what is known of how they came about.

    - ``output``: every sequence with its tokens so far. The stop reason of one that has not ended means nothing.
    - ``report``: the stop reason is empty for a sequence that has not ended.
    - ``publication``: the publication that the first token was drawn from, None if that is not known.
    - ``restarts``: how often the sample was begun anew.
    """

    output: SampleOutput
    report: SampleReport
    publication: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class SavedProgress:
    """A saved progress as bytes.

    ``is_stale``: a sampling process has died with further tokens, which only the sample's followers may have. ``body`` is
    empty when none were saved before.
    """

    body: bytes
    is_stale: bool


def lacks_scores(sample: SampleRequest, output: SampleOutput) -> bool:
    """Return whether ``output`` has tokens without the scores that ``sample`` asks for: nothing can be drawn after them."""
    return bool(
        (sample.prompt_logprobs and output.prompt_logprobs is None)
        or (sample.topk_prompt_logprobs and output.topk_prompt_logprobs is None)
        or (sample.target_prompt_logprobs is not None and output.target_prompt_logprobs is None)
        or (sample.prompt_alt_tokens_k and output.prompt_alt_tokens is None)
        or (sample.topk_sample_logprobs and any(one.topk_logprobs is None for one in output.sequences))
    )


class _Packed(msgspec.Struct, array_like=True):
    output: bytes
    report: bytes
    publication: int | None
    restarts: int


def encode_progress(progress: SampleProgress) -> bytes:
    """Encode the progress as msgpack."""
    output, report = encode(progress.output), encode_report(progress.report)
    return msgspec.msgpack.encode(_Packed(output, report, progress.publication, progress.restarts))


def decode_progress(body: bytes) -> SampleProgress:
    """Decode a progress. Raises ``ValueError`` for bytes that are none."""
    packed = msgspec.msgpack.decode(body, type=_Packed)
    output = decode_result(OperationKind.SAMPLE, packed.output)
    if not isinstance(output, SampleOutput):
        raise ValueError("not the output of a sample")
    return SampleProgress(output, decode_report(packed.report), packed.publication, packed.restarts)
