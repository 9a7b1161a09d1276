"""Made-up requests and bodies: no answer is 5xx and the event loop never stands still."""

import json
from datetime import timedelta
from typing import Any

import httpx
import pytest
import schemathesis
import zstandard
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as bounded
from hypothesis import strategies as st
from schemathesis.generation.case import Case

from api.wire import weft_wire_pb2 as pb
from store.settings import Settings
from tests.api.conftest import BASE, Service, Tenant
from tests.api.stalls import no_stall

EXAMPLES, BODIES = 4, 60
NO_HEALTH = list(HealthCheck)
ENDS_KEY = "/api/weft/v1/keys/{key_id}"

NUMBERS = st.one_of(st.sampled_from([0, 1, -1, 2**31 - 1, 2**62, -(2**63)]), st.integers(-(2**63), 2**63 - 1))
PIECES = st.one_of(st.binary(max_size=64), st.just(b"\1\0\0\0" * 16))
TENSORS = st.builds(
    pb.Tensor, dense=PIECES, dtype=st.sampled_from([0, 1, 2, 3, 4, 99]), shape=st.lists(NUMBERS, max_size=12)
) | st.builds(
    pb.Tensor,
    sparse_csr=st.builds(pb.SparseCsr, values=PIECES, crow_indices=PIECES, col_indices=PIECES),
    dtype=st.sampled_from([1, 2, 3]),
    shape=st.lists(NUMBERS, max_size=3),
)
NAMES = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "\0", "x" * 300])
DATA = st.builds(
    pb.Datum,
    model_input=st.lists(st.builds(pb.Chunk, encoded_text=st.builds(pb.EncodedTextChunk, tokens=PIECES)), max_size=3),
    loss_fn_inputs=st.dictionaries(NAMES, TENSORS, max_size=4),
)
REQUESTS = st.builds(
    pb.ForwardBackwardRequest,
    seq_id=st.integers(-(2**31), 2**31 - 1),
    data=st.lists(DATA, max_size=4),
    loss_fn=st.sampled_from(["cross_entropy", "ppo", "", "\0"]),
    loss_fn_config=st.dictionaries(st.sampled_from(["clip_low_threshold", "\0"]), st.floats(), max_size=2),
)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings under which a poll for what never comes is answered soon."""
    return settings.model_copy(update={"poll_hold": timedelta(seconds=0.1)})


def _spoilt(message: bytes, at: int, by: bytes, times: int, packed: bool) -> tuple[bytes, bool]:
    """The message with something put in its middle many times, as zstd or plain."""
    place = at % (len(message) + 1)
    body = message[:place] + by * times + message[place:]
    return (zstandard.ZstdCompressor().compress(body), True) if packed else (body, False)


SPOILS = st.tuples(
    st.integers(0, 2**16),
    st.sampled_from([b"", b"\x1a\x00", b"\x1a\x02\x0a\x00", b"\xff", b"\x0b", b"\x00", b"\x22\x01\x00"])
    | st.binary(max_size=8),
    st.sampled_from([1, 1, 1, 1000, 2_000_000]),
    st.booleans(),
)


async def test_fuzzed_protobuf_and_zstd_bodies_are_never_5xx(cats: Tenant, dogs: Tenant) -> None:
    run, theirs = await cats.run(), await dogs.session()
    cases: list[tuple[pb.ForwardBackwardRequest, Any]] = []

    @bounded(max_examples=BODIES, derandomize=True, database=None, suppress_health_check=NO_HEALTH)
    @given(REQUESTS, SPOILS)
    def collect(message: pb.ForwardBackwardRequest, spoil: Any) -> None:
        cases.append((message, spoil))

    collect()
    async with no_stall():
        for message, spoil in cases:
            message.model_id = run
            body, is_packed = _spoilt(message.SerializeToString(), *spoil)
            headers = {"Content-Type": "application/x-protobuf", **({"Content-Encoding": "zstd"} if is_packed else {})}
            answer = await cats.http.post("/forward_backward", content=body, headers=headers)
            assert answer.status_code < 500, (message, spoil, answer.text)
            assert (await dogs.http.post("/session_heartbeat", json={"session_id": theirs})).status_code == 200


def aimed(value: Any, ids: dict[str, Any]) -> Any:
    """A made-up body with ids that exist, where it names any: what comes behind the look-up is reached as well."""
    if isinstance(value, dict):
        return {name: ids.get(name, aimed(one, ids)) for name, one in value.items()}
    return [aimed(one, ids) for one in value] if isinstance(value, list) else value


async def test_made_up_requests_to_every_documented_route_are_never_5xx(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    theirs, cases = await dogs.session(), []
    schema = schemathesis.openapi.from_dict(service.app.openapi())
    for operation in (one.ok() for one in schema.get_all_operations()):
        if "/auth/" in operation.path or (operation.method, operation.path) == ("delete", ENDS_KEY):
            # A made-up revocation would end the key of all other requests.
            continue

        @bounded(
            max_examples=EXAMPLES if operation.body else 1,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=NO_HEALTH,
        )
        @given(operation.as_strategy())
        def collect(case: Case) -> None:
            cases.append(case)

        collect()
    assert len({case.operation.label for case in cases}) > 40
    assert len({case.operation.label for case in cases if isinstance(case.body, dict)}) > 20
    run, session = await cats.run(), await cats.session()
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    made = await cats.http.post("/create_sampling_session", json=sampler)
    ids = {"model_id": run, "session_id": session, "base_model": BASE, "model": BASE, **made.json()}
    numbers = iter(range(10**6))
    async with no_stall(), httpx.AsyncClient(base_url=service.url, timeout=40) as http:
        for case in cases:
            path = case.formatted_path.replace(case.path_parameters.get("run_id", "\0"), run)
            for body in (case.body, aimed(case.body, {**ids, "seq_id": next(numbers), "model_seq_id": next(numbers)})):
                content = json.dumps(body, default=repr).encode() if isinstance(body, dict) else b"{}"
                query = {name: str(value) for name, value in case.query.items()}
                headers = {"X-API-Key": cats.key, "Content-Type": "application/json"}
                answer = await http.request(case.method, path, params=query, headers=headers, content=content)
                assert answer.status_code < 500, (case, body, answer.text)
        assert (await dogs.http.post("/session_heartbeat", json={"session_id": theirs})).status_code == 200
    assert (await cats.http.get("/sessions")).status_code == 200, "the key that sent them has ended on the way"


NO_BODY = {
    "/api/v1/auth/token",
    "/api/v1/client/config",
    "/api/v1/client/dynamic_config",
    "/api/v1/telemetry",
    "/api/v1/training_runs/{run_id}/checkpoints/{segment}/{name}/publish",
    "/api/weft/v1/webhooks/{name}/events/{event_id}/retry",
    "/api/weft/v1/webhooks/{name}/secret",
    "/api/weft/v1/webhooks/{name}/test",
}
"""Routes that read no field of what they are sent."""


def test_the_document_describes_every_body_that_is_read(service: Service) -> None:
    document = service.app.openapi()
    schemas = document["components"]["schemas"]
    writing = {
        path: operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method in ("post", "put", "patch")
    }
    assert len(writing) > 20
    assert {path for path, operation in writing.items() if "requestBody" not in operation} == NO_BODY
    assert set(writing["/api/weft/v1/imports"]["requestBody"]["content"]) == {"application/octet-stream"}
    for path in writing.keys() - NO_BODY - {"/api/weft/v1/imports"}:
        schema = writing[path]["requestBody"]["content"]["application/json"]["schema"]
        for form in schema.get("anyOf", [schema]):
            assert schemas[form["$ref"].rpartition("/")[2]]["properties"], path
