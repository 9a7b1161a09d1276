"""Sampling logprobs of training data, read from the records of the samples that its provenance spans name.

The records of one request may hold far more than the request, so their sizes are read before their bodies, and the bodies
are read and decoded a portion at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from api.services import ApiServices
from contracts.errors import InvalidRequest
from contracts.ids import TenantId
from contracts.losses import ADVANTAGES, SAMPLING_LOGPROBS
from contracts.operations import TrainingBatch
from contracts.provenance import MOST_RECORD_BYTES, SampleRecord, decode_sample_record
from contracts.provenance_spans import Span, sample_of
from tenants.sample_records import MOST_READ, RecordFacts, record_facts, recorded_samples, renew_records, to_renew

MOST_NAMED = 8192
"""Most samples that the spans of one request may name."""
MOST_NAMED_BYTES = 512 * 2**20
"""Most bytes that the records of these samples may hold once decoded: bounds the time of the threads."""
_PORTION_BYTES = 4 * 2**20
"""Bytes after which a portion of records ends, once decoded: bounds memory."""


async def with_recorded_logprobs(services: ApiServices, caller: TenantId, batch: TrainingBatch) -> TrainingBatch:
    """Return the batch with the sampling logprobs of the records that its spans name, and without the spans.

    The time for which these records are kept begins anew.

    Raises ``InvalidRequest`` for a sample of which there is no record, for tokens other than the recorded ones, for an
    advantage on a prompt's token and for records beyond the bounds of this module; ``Unavailable``.
    """
    if batch.provenance is None:
        return batch
    database, now, threads = services.runtime.database, services.runtime.clock(), services.admission.threads
    kept = services.runtime.settings.retention_sample_records
    filling = await threads.run(caller, _Filling, batch)
    facts: dict[str, RecordFacts] = {}
    for ids in _slices(filling.samples):
        async with database.read() as session:
            facts |= await record_facts(session, caller, ids, now=now)
    for portion in await threads.run(caller, filling.portions, facts):
        async with database.read() as session:
            bodies = await recorded_samples(session, caller, portion, now=now)
        await threads.run(caller, filling.fill, portion, bodies)
    for ids in _slices(to_renew(facts, kept, now)):
        async with database.write() as transaction:
            await renew_records(transaction, caller, ids, until=now + kept)
    return filling.filled()


@dataclass(frozen=True, slots=True)
class _Use:
    """A span of datum ``datum``: number ``number`` of its spans, of its tokens or targets from ``start`` on."""

    span: Span
    datum: int
    number: int
    start: int
    is_target: bool

    @property
    def field(self) -> str:
        """Name of the span in messages."""
        spans = "loss_fn_input_spans" if self.is_target else "model_input_spans"
        return f"data[{self.datum}].{spans}[{self.number}]"


class _Filling:
    """A batch whose sampling logprobs are filled in, record by record."""

    def __init__(self, batch: TrainingBatch) -> None:
        """Sort the spans by sample. Raises ``InvalidRequest`` if they name too many, or a prompt's token has an advantage."""
        self._batch = batch
        self._logprobs: dict[int, np.ndarray] = {}
        self._uses: dict[str, list[_Use]] = {}
        for datum, spans in enumerate(batch.provenance or ()):
            if spans is None:
                continue
            self._logprobs[datum] = np.zeros(len(batch.data[datum].targets), np.float32)
            for uses in (_uses(datum, spans.tokens, is_target=False), _uses(datum, spans.targets, is_target=True)):
                for use in uses:
                    self._check_advantages(use)
                    self._uses.setdefault(sample_of(use.span.sequence_id)[0], []).append(use)
        if len(self._uses) > MOST_NAMED:
            raise InvalidRequest(
                f"the spans of the data name {len(self._uses)} samples, and those of one request may name {MOST_NAMED}; "
                "send fewer data in a request"
            )

    @property
    def samples(self) -> list[str]:
        """Ids of the samples that the spans name."""
        return list(self._uses)

    def portions(self, facts: Mapping[str, RecordFacts]) -> list[list[str]]:
        """Return the samples in portions to read together. ``facts``: those of each record.

        Raises ``InvalidRequest`` for a sample without a record, and for records that are too large together.
        """
        for sample, uses in self._uses.items():
            if sample not in facts:
                raise _no_record(uses[0])
        if (size := sum(one.nbytes for one in facts.values())) > MOST_NAMED_BYTES:
            raise InvalidRequest(
                f"the spans of the data name samples of {size} bytes, and those of one request may name {MOST_NAMED_BYTES}; "
                "send fewer data in a request"
            )
        portions: list[list[str]] = []
        held = _PORTION_BYTES
        for sample in self._uses:
            if held >= _PORTION_BYTES or len(portions[-1]) == MOST_READ:
                portions.append([])
                held = 0
            portions[-1].append(sample)
            held += facts[sample].nbytes
        return portions

    def fill(self, samples: Sequence[str], bodies: Mapping[str, bytes]) -> None:
        """Fill in what the spans of ``samples`` name. Raises ``InvalidRequest`` for other tokens than the recorded ones."""
        for sample in samples:
            uses = self._uses[sample]
            if sample not in bodies:
                raise _no_record(uses[0])
            record = decode_sample_record(bodies[sample])
            for use in uses:
                self._fill_one(use, record)

    def filled(self) -> TrainingBatch:
        """Return the batch with the logprobs, and without the spans."""
        data = [
            replace(datum, inputs={**datum.inputs, SAMPLING_LOGPROBS: self._logprobs[number]})
            if number in self._logprobs
            else datum
            for number, datum in enumerate(self._batch.data)
        ]
        return replace(self._batch, data=data, provenance=None)

    def _check_advantages(self, use: _Use) -> None:
        if use.span.is_sampled or not use.is_target:
            return
        advantages = self._batch.data[use.datum].inputs[ADVANTAGES][use.start : use.start + use.span.length]
        if advantages.any():
            at = use.start + int(advantages.nonzero()[0][0])
            raise InvalidRequest(
                f"data[{use.datum}].loss_fn_inputs.{ADVANTAGES}: target {at} is a token of a prompt, as {use.field} says, and "
                "only sampled tokens may have an advantage other than 0"
            )

    def _fill_one(self, use: _Use, record: SampleRecord) -> None:
        span, datum = use.span, self._batch.data[use.datum]
        found = record.of(span, sample_of(span.sequence_id)[1])
        if found is None:
            raise InvalidRequest(
                f"{use.field}: sequence {span.sequence_id[:100]!r} has no {span.length} tokens from {span.offset} on"
            )
        end = use.start + span.length
        tokens = (datum.targets if use.is_target else datum.tokens)[use.start : end]
        if not np.array_equal(found[0], tokens):
            raise InvalidRequest(
                f"{use.field}: the tokens at {use.start} to {end} are not those of sequence {span.sequence_id[:100]!r} from "
                f"{span.offset} on"
            )
        if use.is_target:
            self._logprobs[use.datum][use.start : end] = found[1]


def _uses(datum: int, spans: Sequence[Span], *, is_target: bool) -> Iterator[_Use]:
    start = 0
    for number, span in enumerate(spans):
        if span.length:
            yield _Use(span, datum, number, start, is_target)
        start += span.length


def _slices(samples: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(samples), MOST_READ):
        yield samples[begin : begin + MOST_READ]


def _no_record(use: _Use) -> InvalidRequest:
    return InvalidRequest(
        f"{use.field}: there is no record of sequence {use.span.sequence_id[:100]!r}; sample with record_stability_info, and "
        "train within a day of that, or of the last training on it, and before the sampler's session ends. A sample of more than "
        f"{MOST_RECORD_BYTES // 2**20} MiB of tokens and logprobs has no record, and a tenant's oldest records are forgotten "
        "beyond its sample_record_bytes"
    )
