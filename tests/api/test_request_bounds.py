"""No body, however small on the wire, holds up other tenants: everything is bounded before it is built."""

import asyncio
import importlib
import json
import pkgutil
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import zstandard
from fastapi import APIRouter
from fastapi.routing import APIRoute

import api
from api.request_body import OFF_LOOP_BYTES
from api.route_bounds import ANY_SIZE, JSON_DATA_BODY, PROMPT_BODY, STREAMED_BODY, TEXT_BODY, declared_bounds
from api.tinker import training
from api.wire import request_model, training_codec
from api.wire import weft_wire_pb2 as pb
from store.settings import Settings
from tests.api.conftest import Service, Tenant
from tests.api.stalls import no_stall

MIB = 2**20
PROTOBUF = {"Content-Type": "application/x-protobuf"}
CARRY_DATA = {
    "/forward_backward": ANY_SIZE,
    "/forward": JSON_DATA_BODY,
    "/asample": PROMPT_BODY,
    "/stream_sample": PROMPT_BODY,
    "/telemetry": TEXT_BODY,
    "/chat/completions": TEXT_BODY,
    "/completions": PROMPT_BODY,
    "/imports": STREAMED_BODY,
    "/playground": TEXT_BODY,
    "/playground/stream": TEXT_BODY,
}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with the default bounds of bodies."""
    return Settings(data_dir=settings.data_dir)


def routes() -> list[APIRoute]:
    """Every route of every router of the API."""
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages(api.__path__, "api.")]
    routers = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, APIRouter)}
    return [one for router in routers.values() for one in router.routes if isinstance(one, APIRoute)]


def varint(number: int) -> bytes:
    """A protobuf varint."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def packed(body: bytes) -> bytes:
    """The body as zstd: a few bytes for millions."""
    return zstandard.ZstdCompressor(level=19).compress(body)


async def heartbeats(tenant: Tenant, session: str, until: asyncio.Event) -> int:
    """Heartbeats one after the other, each of which must be answered; returns their number."""
    count = 0
    while not until.is_set() or count == 0:
        assert (await tenant.http.post("/session_heartbeat", json={"session_id": session})).status_code == 200
        count += 1
    return count


async def answer_beside(dogs: Tenant, attack: Any) -> httpx.Response:
    """The answer to an attack, beside which ``dogs`` go on and the loop never stands still."""
    session, over = await dogs.session(), asyncio.Event()
    beating = asyncio.create_task(heartbeats(dogs, session, over))
    try:
        async with no_stall(), asyncio.timeout(60):
            answer: httpx.Response = await attack
    finally:
        over.set()
        await beating
    return answer


async def failure(tenant: Tenant, answer: httpx.Response) -> str:
    """The text of a refusal: of a 4xx, or of the failed future that keeps the seq_id."""
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500
        return str(answer.json()["detail"])
    future = await tenant.http.post("/retrieve_future", json={"request_id": answer.json()["request_id"]})
    return str(future.json()["error"])


def test_every_route_has_a_small_limit_unless_it_carries_data() -> None:
    found = {(route.path, declared_bounds(route.endpoint).body_bytes) for route in routes()}
    assert len(found) > 50
    assert {path: limit for path, limit in found if limit > MIB} == CARRY_DATA


@pytest.mark.parametrize("path", ["session_heartbeat", "retrieve_future", "get_info", "optim_step", "weights_info"])
async def test_a_few_bytes_that_expand_are_refused_at_the_routes_own_limit(
    cats: Tenant, dogs: Tenant, path: str
) -> None:
    body = packed(b'{"tags":[' + b"{}," * (20 * MIB) + b"{}]}")
    attack = cats.http.post(f"/{path}", content=body, headers={"Content-Encoding": "zstd"})
    answer = await answer_beside(dogs, attack)
    assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")


HOSTILE_JSON = {
    "many bad sequences": b'{"forward_input":{"data":[' + b"0," * (2 * MIB) + b"0]},%s}",
    "many empty sequences": b'{"forward_input":{"data":[' + b"{}," * (2 * MIB) + b"{}]},%s}",
    "many bad fields": b'{"forward_input":{"data":[{"loss_fn_inputs":{' + b'"a":0,' * MIB + b'"b":0}}]},%s}',
    "deep nesting": b'{"forward_input":' + b"[" * (4 * MIB) + b"]" * (4 * MIB) + b",%s}",
    "long numbers": b'{"forward_input":{"data":[' + (b"1" * 4000 + b",") * 2500 + b"1]},%s}",
    "one endless number": b'{"forward_input":{"data":[' + b"1" * (11 * MIB) + b"]},%s}",
    "many numbers": b'{"forward_input":{"data":[{"model_input":{"chunks":[{"tokens":['
    + b"0," * (5 * MIB)
    + b"0]}]}}]},%s}",
}


@pytest.mark.parametrize("name", list(HOSTILE_JSON))
async def test_a_hostile_json_pass_is_refused_while_others_go_on(cats: Tenant, dogs: Tenant, name: str) -> None:
    run = await cats.run()
    key = b'"model_id":"' + run.encode() + b'","seq_id":1'
    body = packed(HOSTILE_JSON[name].replace(b"%s", key))
    assert len(body) < 8192
    answer = await answer_beside(dogs, cats.http.post("/forward", content=body, headers={"Content-Encoding": "zstd"}))
    told = await failure(cats, answer)
    assert len(told) < 1000
    assert name != "long numbers" or "a number of more than 40 digits" in told
    if name != "deep nesting":
        assert answer.status_code == 200, "the refused pass keeps its seq_id, so that the next one is not held back"


async def test_a_save_that_is_nested_too_deep_keeps_its_seq_id(cats: Tenant, dogs: Tenant) -> None:
    run = await cats.run()
    deep = b"[" * 300 + b"]" * 300
    body = b'{"model_id":"' + run.encode() + b'","seq_id":1,"user_metadata":{"a":' + deep + b"}}"
    attack = cats.http.post("/save_weights_for_sampler", content=body, headers={"Content-Type": "application/json"})
    answer = await answer_beside(dogs, attack)
    assert answer.status_code == 200
    assert "recursion limit" in await failure(cats, answer)


async def test_a_save_that_is_a_list_and_too_large_is_refused(cats: Tenant, dogs: Tenant) -> None:
    run = await cats.run()
    body = b'[{"model_id":"' + run.encode() + b'","seq_id":1}]' + b" " * MIB
    attack = cats.http.post("/save_weights_for_sampler", content=body, headers={"Content-Type": "application/json"})
    answer = await answer_beside(dogs, attack)
    assert answer.status_code < 500, answer.text


@pytest.mark.parametrize("field", [b"\x1a\x00", b"\x1a\x02\x0a\x00", b"\x2a\x00", b"\x3a\x00"])
async def test_records_of_two_bytes_are_counted_before_they_are_built(cats: Tenant, dogs: Tenant, field: bytes) -> None:
    run = await cats.run()
    key = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy").SerializeToString()
    body = packed(key + field * (4 * MIB))
    assert len(body) < 8192
    attack = cats.http.post("/forward_backward", content=body, headers={"Content-Encoding": "zstd", **PROTOBUF})
    answer = await answer_beside(dogs, attack)
    assert "fields" in await failure(cats, answer)


@pytest.mark.parametrize("place", ["request", "datum"])
async def test_a_large_unknown_field_is_refused_before_a_parser_copies_it(
    cats: Tenant, dogs: Tenant, place: str
) -> None:
    run, unknown = await cats.run(), b"\xa2\x06" + varint(60 * MIB) + bytes(60 * MIB)
    key = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy").SerializeToString()
    message = key + unknown if place == "request" else key + b"\x1a" + varint(len(unknown)) + unknown
    attack = cats.http.post(
        "/forward_backward", content=packed(message), headers={"Content-Encoding": "zstd", **PROTOBUF}
    )
    told = await failure(cats, await answer_beside(dogs, attack))
    assert ("beside its data" if place == "request" else "data[0] has 62914566 bytes") in told


async def test_no_parser_is_given_more_than_one_datum(
    cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser holds the interpreter's lock from the first to the last byte of a message, and all others wait."""
    parsed: list[int] = []

    class Noted:
        def __init__(self, message: Any) -> None:
            self._message = message

        def FromString(self, body: bytes) -> Any:
            parsed.append(len(body))
            return self._message.FromString(body)

    request = pb.ForwardBackwardRequest
    for name in ("ForwardBackwardRequest", "Datum"):
        monkeypatch.setattr(training_codec.pb, name, Noted(getattr(pb, name)))
    run = await cats.run()
    message = request(model_id=run, seq_id=1, loss_fn="cross_entropy")
    for _ in range(64):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = b"\1\0\0\0" * 16
        datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=b"\1" + bytes(7), dtype=pb.DTYPE_INT64))
    body = message.SerializeToString()
    attack = cats.http.post("/forward_backward", content=body, headers=PROTOBUF)
    assert (await answer_beside(dogs, attack)).status_code == 200
    assert len(parsed) >= 65
    assert max(parsed) < len(body) / 32


@pytest.mark.parametrize("sizes", [[2**62] * 500_000, [2**40] * 9])
async def test_a_shape_of_many_dimensions_is_refused_before_they_are_multiplied(
    cats: Tenant, dogs: Tenant, sizes: list[int]
) -> None:
    run = await cats.run()
    message = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0"
    datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=b"\1" * 8, dtype=pb.DTYPE_INT64, shape=sizes))
    body = packed(message.SerializeToString())
    attack = cats.http.post("/forward_backward", content=body, headers={"Content-Encoding": "zstd", **PROTOBUF})
    answer = await answer_beside(dogs, attack)
    assert answer.status_code == 200
    text = await failure(cats, answer)
    assert "dimensions" in text or "fields" in text


async def test_a_json_shape_of_many_dimensions_is_refused_before_they_are_multiplied(
    cats: Tenant, dogs: Tenant
) -> None:
    run = await cats.run()
    tensor = {"data": [1], "dtype": "int64", "shape": [10**18] * 300_000}
    data = [{"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {"target_tokens": tensor}}]
    body = {"model_id": run, "seq_id": 1, "forward_input": {"data": data, "loss_fn": "cross_entropy"}}
    attack = cats.http.post("/forward", content=packed(json.dumps(body).encode()), headers={"Content-Encoding": "zstd"})
    assert "dimensions" in await failure(cats, await answer_beside(dogs, attack))


async def test_a_large_body_is_parsed_on_a_thread(cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers hold up whoever shares their thread. A small body costs less than a thread does."""
    on_loop: list[tuple[bool, bool]] = []

    def noted(parse: Callable[..., Any]) -> Callable[..., Any]:
        def parse_noted(body: bytes, *args: Any) -> Any:
            on_loop.append((len(body) > OFF_LOOP_BYTES, threading.current_thread() is threading.main_thread()))
            return parse(body, *args)

        return parse_noted

    monkeypatch.setattr(request_model, "check_json_counts", noted(request_model.check_json_counts))
    monkeypatch.setattr(training, "parse_proto", noted(training.parse_proto))
    run, session = await cats.run(), await dogs.session()
    padding = {"unknown": "x" * OFF_LOOP_BYTES}
    message = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy").SerializeToString()
    await cats.http.post("/asample", json={"sampling_session_id": "s:sample:0", "seq_id": 0, **padding})
    await cats.http.post("/forward", json={"model_id": run, "seq_id": 2, **padding})
    await cats.http.post("/forward_backward", content=message + b"\x1a\x00" * OFF_LOOP_BYTES, headers=PROTOBUF)
    assert (await dogs.http.post("/session_heartbeat", json={"session_id": session})).status_code == 200
    assert {on for is_large, on in on_loop if is_large} == {False}
    assert sum(is_large for is_large, _ in on_loop) >= 3
    assert (False, True) in on_loop


async def test_one_tenants_heavy_bodies_leave_a_thread_to_the_others(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    threads, blocked, release = service.services.admission.threads, asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def heavy() -> None:
        loop.call_soon_threadsafe(blocked.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(60)

    held = [asyncio.create_task(threads.run(cats.id, heavy)) for _ in range(8)]
    async with asyncio.timeout(60):
        await blocked.wait()
        assert await threads.run(dogs.id, lambda: "done") == "done"
        release.set()
        await asyncio.gather(*held)


async def test_large_bodies_of_one_tenant_wait_unread_while_another_tenants_are_read(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    shares = service.services.admission.body_bytes
    await shares.take(cats.id, 2**40, patience=0, what="bytes")
    body = {"sampling_session_id": "s:sample:0", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1] * 50_000}]}}
    waiting = asyncio.create_task(cats.http.post("/asample", json=body))
    async with asyncio.timeout(60):
        # Several, so that one that did not wait would be answered by then.
        for _ in range(8):
            assert (await dogs.http.post("/asample", json=body)).status_code == 404
        assert not waiting.done()
        shares.give_back(cats.id, 2**40)
        assert (await waiting).status_code == 404
