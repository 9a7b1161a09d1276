"""A body that was refused is freed with its answer: it waits for no garbage collector, which looks at old objects seldom."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from api.wire import weft_wire_pb2 as pb
from store.settings import Settings
from tests.api.conftest import BASE, Tenant
from tests.api.test_request_bounds import MIB, PROTOBUF, packed

LARGE = MIB
"""Bytes of what may not stay."""
_ZSTD = {"Content-Encoding": "zstd"}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with the default bounds of bodies."""
    return Settings(data_dir=settings.data_dir)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Nothing is collected but by the test."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def bodies(run: str) -> dict[str, tuple[str, bytes, dict[str, str]]]:
    """Path, content and headers of bodies that are refused, each at another place."""
    key = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy").SerializeToString()
    named = b'"model_id":"' + run.encode() + b'","seq_id":2'
    text = b'{"model":"' + BASE.encode() + b'","prompt":"' + b"a" * (4 * MIB) + b'"}'
    return {
        "no data": ("/forward_backward", key + b"\xa2\x06\x80\x80\x80\x02" + bytes(4 * MIB), PROTOBUF),
        "too many records": ("/forward_backward", key + b"\x1a\x00" * (4 * MIB), PROTOBUF),
        "too large": ("/forward_backward", bytes(80 * MIB), PROTOBUF),
        "no message": ("/forward_backward", b"\xff" * (4 * MIB), PROTOBUF),
        "bad JSON": (
            "/forward",
            b'{"forward_input":{"data":[' + b"0," * 200_000 + b"0]}," + named + b" " * MIB + b"}",
            {},
        ),
        "too many values": ("/forward", b'{"forward_input":{"data":[' + b"0," * (2 * MIB) + b"0]}," + named + b"}", {}),
        "too large for its route": ("/create_session", b'{"tags":[' + b"{}," * (2 * MIB) + b"{}]}", {}),
        "a sample": ("/asample", b'{"prompt":{"chunks":[{"tokens":[' + b"1," * MIB + b"-1]}]}}", {}),
        "a text": ("/v1/completions", text, {}),
    }


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("which", list(bodies("")))
async def test_no_refused_body_outlives_its_answer(cats: Tenant, which: str) -> None:
    path, content, headers = bodies(await cats.run())[which]
    url = cats.service.url + path if path.startswith("/v1") else path
    gc.collect()
    answer = await cats.http.post(url, content=packed(content), headers=_ZSTD | headers)
    if answer.status_code == 200:
        future = await cats.http.post("/retrieve_future", json={"request_id": answer.json()["request_id"]})
        assert "error" in future.json()
    else:
        assert 400 <= answer.status_code < 500
    # The loop itself holds what has just ended until its next turn.
    await asyncio.sleep(0)
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    kept = [type(one).__name__ for one in gc.garbage if any(map(_is_large, gc.get_referents(one)))]
    assert kept == []


def _is_large(found: object) -> bool:
    return isinstance(found, bytes | bytearray | str) and len(found) >= LARGE
