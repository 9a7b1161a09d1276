"""Training data that names its samples: what its records may cost, and what an outage does to it."""

import threading
from collections.abc import Iterable
from datetime import timedelta

import httpx
import numpy as np
import pytest
from sqlalchemy import select
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from api import provenance
from contracts.errors import Unavailable
from contracts.operations import SampledSequence, SampleOutput, SampleRequest, TrainingBatch
from contracts.provenance import MOST_RECORD_BYTES, decode_sample_record, decoded_bytes, encode_sample_record
from store.tables import SampleRecord
from tenants.limits import Limits
from tenants.sample_records import NewRecord, record_samples
from tests.api.conftest import BASE, Service, Tenant
from tests.ledger_heads import ready_heads

PROMPT, SAMPLED = [1, 2], [3, 4, 5]


def record_of(logprobs: list[float], *, prompt: int = 2) -> bytes:
    """A record of ``SAMPLED`` with these logprobs after a prompt of that many tokens."""
    sequence = SampledSequence("stop", np.array(SAMPLED, np.int32), np.array(logprobs, np.float32))
    body = encode_sample_record(SampleRequest(np.arange(1, prompt + 1)), SampleOutput([sequence]))
    assert body is not None
    return body


async def record(tenant: Tenant, **bodies: bytes) -> None:
    """Record samples of a new sampler of the tenant's, as a pool does."""
    opened = {"session_id": await tenant.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await tenant.http.post("/create_sampling_session", json=opened)).json()["sampling_session_id"]
    runtime = tenant.service.services.runtime
    now = runtime.clock()
    new = [NewRecord(name, tenant.id, sampler, body) for name, body in bodies.items()]  # type: ignore[arg-type]
    async with runtime.database.write() as transaction:
        expires_at = now + runtime.settings.retention_sample_records
        await record_samples(transaction, new, Limits.of(runtime.settings), now=now, expires_at=expires_at)


def naming(sample: str, *, empty: Iterable[str] = (), of_prompt: float = 0.0) -> types.Datum:
    """A datum of the sample, with empty spans of others. ``of_prompt``: advantage of the prompt's token."""
    name = f"{sample}:0"
    none = [SampledProvenanceSpan(sequence_id=f"{other}:0", length=0) for other in empty]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([*PROMPT, *SAMPLED[:-1]]),
        loss_fn_inputs={"target_tokens": [PROMPT[1], *SAMPLED], "advantages": [of_prompt, 1.0, 1.0, 1.0]},
    )
    return datum.with_provenance(
        model_input=[
            PromptProvenanceSpan(sequence_id=name, length=2),
            *none,
            SampledProvenanceSpan(sequence_id=name, length=2),
        ],
        loss_fn_inputs=[
            PromptProvenanceSpan(sequence_id=name, offset=1, length=1),
            SampledProvenanceSpan(sequence_id=name, length=3),
        ],
    )


async def train(tenant: Tenant, run: str, seq_id: int, *data: types.Datum) -> httpx.Response:
    """Send the batch as the SDK does."""
    asked = ForwardBackwardInput(data=list(data), loss_fn="stable_reinforce", loss_fn_config={"kl_coeff": 0.5})
    body = forward_backward_request_to_proto(ForwardBackwardRequest(asked, run, seq_id)).SerializeToString()
    return await tenant.http.post("/forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"})


async def refusal(tenant: Tenant, run: str, seq_id: int, *data: types.Datum) -> str:
    """The error of a batch that was recorded as failed."""
    accepted = await train(tenant, run, seq_id, *data)
    assert accepted.status_code == 200, accepted.text
    found = await tenant.http.post("/retrieve_future", json={"request_id": accepted.json()["request_id"]})
    error: str = found.json()["error"]
    return error


async def logprobs(service: Service) -> dict[str, list[list[float]]]:
    """The sampling logprobs of the batches that may run next, by tenant."""
    async with service.database.read() as session:
        ready = await ready_heads(service.ledger, session, BASE)
    return {
        one.tenant: [datum.inputs["logprobs"].tolist() for datum in one.payload.data]
        for one in ready
        if isinstance(one.payload, TrainingBatch)
    }


async def test_an_outage_while_records_are_read_fails_no_batch(
    service: Service, cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(cats, mine=record_of([-1, -2, -3]))
    await record(dogs, theirs=record_of([-4, -5, -6]))
    mine, theirs = await cats.run(), await dogs.run()
    read = provenance.record_facts

    async def gone(session, tenant, ids, *, now):
        if tenant == cats.id:
            raise Unavailable("the database does not answer; try again in a moment")
        return await read(session, tenant, ids, now=now)

    monkeypatch.setattr(provenance, "record_facts", gone)
    refused = await train(cats, mine, 1, naming("mine"))
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert (await train(dogs, theirs, 1, naming("theirs"))).status_code == 200
    monkeypatch.undo()
    assert (await train(cats, mine, 1, naming("mine"))).status_code == 200
    assert await logprobs(service) == {cats.id: [[0, -1, -2, -3]], dogs.id: [[0, -4, -5, -6]]}


async def test_records_are_decoded_on_threads_a_portion_at_a_time(
    service: Service, cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await record(cats, first=record_of([-1, -2, -3]), second=record_of([-4, -5, -6], prompt=9))
    await record(dogs, theirs=record_of([-7, -8, -9]))
    threads: list[threading.Thread] = []
    portions: list[int] = []

    def decode(body: bytes):
        threads.append(threading.current_thread())
        return decode_sample_record(body)

    read = provenance.recorded_samples

    async def bodies(session, tenant, ids, *, now):
        portions.append(len(ids))
        return await read(session, tenant, ids, now=now)

    monkeypatch.setattr(provenance, "decode_sample_record", decode)
    monkeypatch.setattr(provenance, "recorded_samples", bodies)
    monkeypatch.setattr(provenance, "_PORTION_BYTES", 1)
    assert (await train(cats, await cats.run(), 1, naming("second"), naming("first"))).status_code == 200
    assert (await train(dogs, await dogs.run(), 1, naming("theirs"))).status_code == 200
    assert await logprobs(service) == {
        cats.id: [[0, -4, -5, -6], [0, -1, -2, -3]],
        dogs.id: [[0, -7, -8, -9]],
    }
    assert (len(threads), threading.current_thread() in threads, portions) == (3, False, [1, 1, 1])


async def test_records_beyond_the_bounds_are_refused_before_they_are_read(
    cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = record_of([-1, -2, -3], prompt=10_000)
    assert decoded_bytes(large[:18]) > 40_000
    await record(cats, large=large, small=record_of([-1, -2, -3]))
    await record(dogs, theirs=record_of([-4, -5, -6]))
    mine, theirs = await cats.run(), await dogs.run()
    read: list[str] = []
    whole = provenance.recorded_samples

    async def bodies(session, tenant, ids, *, now):
        read.extend(ids)
        return await whole(session, tenant, ids, now=now)

    monkeypatch.setattr(provenance, "recorded_samples", bodies)
    monkeypatch.setattr(provenance, "MOST_NAMED_BYTES", 30_000)
    assert "those of one request may name 30000; send fewer data" in await refusal(
        cats, mine, 1, naming("small"), naming("large")
    )
    monkeypatch.setattr(provenance, "MOST_NAMED", 1)
    assert "name 2 samples" in await refusal(cats, mine, 2, naming("small"), naming("large"))
    assert read == []
    assert (await train(dogs, theirs, 1, naming("theirs"))).status_code == 200
    assert (await train(cats, mine, 3, naming("small"))).status_code == 200
    assert read == ["theirs", "small"]


async def test_training_on_a_sequence_begins_its_day_anew_and_no_others(
    service: Service, cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use after use within a few hours writes nothing."""
    await record(cats, mine=record_of([-1, -2, -3]), unused=record_of([-4, -5, -6]))
    await record(dogs, theirs=record_of([-7, -8, -9]))
    mine, theirs = await cats.run(), await dogs.run()
    renewed: list[str] = []
    renew = provenance.renew_records

    async def noted(transaction, tenant, ids, *, until):
        renewed.extend(ids)
        await renew(transaction, tenant, ids, until=until)

    monkeypatch.setattr(provenance, "renew_records", noted)
    for seq_id, hours in ((1, 5), (2, 18), (3, 1), (4, 22), (5, 23)):
        service.clock.move(hours=hours)
        assert (await train(cats, mine, seq_id, naming("mine"))).status_code == 200
    assert renewed == ["mine"] * 3
    async with service.database.read() as session:
        rows = await session.execute(select(SampleRecord.operation_id, SampleRecord.expires_at))
        ends = {row.operation_id: row.expires_at - service.clock() for row in rows}
    assert ends == {"mine": timedelta(hours=24), "unused": timedelta(hours=-45), "theirs": timedelta(hours=-45)}
    assert "there is no record of sequence 'unused:0'" in await refusal(cats, mine, 6, naming("unused"))
    assert "there is no record of sequence 'theirs:0'" in await refusal(dogs, theirs, 1, naming("theirs"))


async def test_a_prompts_token_with_an_advantage_is_refused_by_its_datum(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    """Sampled tokens may have any, and another tenant's batch is trained on."""
    await record(cats, mine=record_of([-1, -2, -3]))
    await record(dogs, theirs=record_of([-4, -5, -6]))
    run = await cats.run()
    refused = await refusal(cats, run, 1, naming("mine"), naming("mine", of_prompt=-0.5))
    assert "data[1].loss_fn_inputs.advantages: target 0 is a token of a prompt" in refused
    assert (await train(cats, run, 2, naming("mine"))).status_code == 200
    assert (await train(dogs, await dogs.run(), 1, naming("theirs"))).status_code == 200
    assert await logprobs(service) == {cats.id: [[0, -1, -2, -3]], dogs.id: [[0, -4, -5, -6]]}


async def test_an_empty_span_names_no_sample(service: Service, cats: Tenant, dogs: Tenant) -> None:
    """A sequence of one token has one in the SDK's own way to write spans."""
    await record(cats, mine=record_of([-1, -2, -3]))
    await record(dogs, theirs=record_of([-4, -5, -6]))
    run = await cats.run()
    data = naming("mine", empty=["theirs", *(f"made up {number}" for number in range(1000))])
    assert (await train(cats, run, 1, data)).status_code == 200
    assert await logprobs(service) == {cats.id: [[0, -1, -2, -3]]}
    assert "there is no record of sequence 'theirs:0'" in await refusal(cats, run, 2, naming("theirs"))


def test_a_sample_beyond_the_size_of_a_record_has_none() -> None:
    most = MOST_RECORD_BYTES // 4
    assert encode_sample_record(SampleRequest(np.zeros(most + 1, np.int64)), SampleOutput([])) is None
    body = encode_sample_record(SampleRequest(np.zeros(1000, np.int64)), SampleOutput([]))
    assert body is not None
    assert 4000 < decoded_bytes(body) < 4100
    with pytest.raises(ValueError, match="not the record"):
        decoded_bytes(b"something")
