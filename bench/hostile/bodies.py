"""Attacks by bodies: few bytes on the wire, or few tokens of text, that take long to look at (A1 to A4)."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from api.wire import weft_wire_pb2 as pb
from bench.hostile.foothold import PREFIX, Foothold, again_and_again, packed

MIB = 2**20
_CONNECTIONS = 16
_ZSTD = {"Content-Encoding": "zstd"}
_PROTOBUF = {"Content-Type": "application/x-protobuf"}


@dataclass(frozen=True, slots=True)
class Body:
    """A body that is sent again and again."""

    path: str
    content: bytes
    headers: Mapping[str, str]


async def shape_dimensions(foothold: Foothold) -> None:
    """Send tensors of half a million dimensions, each of 2^62 (A1)."""

    def bodies(run: str) -> list[Body]:
        message = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = b"\1\0\0\0"
        datum.loss_fn_inputs["target_tokens"].CopyFrom(
            pb.Tensor(dense=b"\1" * 8, dtype=pb.DTYPE_INT64, shape=[2**62] * 500_000)
        )
        tensor = {"data": [1], "dtype": "int64", "shape": [10**18] * 300_000}
        data = [{"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {"target_tokens": tensor}}]
        asked = {"model_id": run, "seq_id": 2, "forward_input": {"data": data, "loss_fn": "cross_entropy"}}
        return [
            Body("/forward_backward", packed(message.SerializeToString()), _ZSTD | _PROTOBUF),
            Body("/forward", packed(json.dumps(asked).encode()), _ZSTD),
        ]

    await _send_for_a_run(foothold, bodies)


_LARGE_JSON = {
    "many bad sequences": b'{"data":[' + b"0," * (2 * MIB) + b"0]}",
    "many empty sequences": b'{"data":[' + b"{}," * (2 * MIB) + b"{}]}",
    "many bad fields": b'{"data":[{"loss_fn_inputs":{' + b'"a":0,' * MIB + b'"b":0}}]}',
    "deep nesting": b"[" * (4 * MIB) + b"]" * (4 * MIB),
    "many numbers": b'{"data":[{"model_input":{"chunks":[{"tokens":[' + b"0," * (5 * MIB) + b"0]}]}}]}",
    "as many errors as are read": b'{"data":[{"loss_fn_inputs":{'
    + b",".join(b'"%d":0' % number for number in range(30_000))
    + b"}}]}",
}
_SMALL_JSON = {
    "tags": b'{"tags":[' + b"{}," * 3_900 + b"{}]}",
    "nested": b'{"user_metadata":' + b'{"a":' * 3_900 + b"1" + b"}" * 3_900 + b"}",
    "fields": b'{"user_metadata":{' + b",".join(b'"%d":[]' % number for number in range(9_000)) + b"}}",
    "expands": b'{"tags":[' + b"{}," * (20 * MIB) + b"{}]}",
}


async def json_bombs(foothold: Foothold) -> None:
    """Send JSON that is deep, of very many values, or of tens of thousands of errors (A2)."""

    def bodies(run: str) -> list[Body]:
        passes = [_forward(run, number, data) for number, data in enumerate(_LARGE_JSON.values(), start=1)]
        paths = ("/create_session", "/session_heartbeat", "/asample", "/create_model")
        return passes + [Body(path, packed(body), _ZSTD) for path, body in product(paths, _SMALL_JSON.values())]

    await _send_for_a_run(foothold, bodies)


async def long_numbers(foothold: Foothold) -> None:
    """Send 10 MB of numbers of 4,000 digits, in training requests, prompts and small bodies (A2)."""

    def bodies(run: str) -> list[Body]:
        digits = b"1" * 4000
        tokens = b",".join([digits] * 2500)
        small = b'{"session_id":' + digits * 15 + b"}"
        return [
            _forward(run, 1, b'{"data":[{"model_input":{"chunks":[{"tokens":[' + tokens + b"]}]}}]}"),
            _forward(run, 2, b'{"data":[' + b"1" * (11 * MIB) + b"]}"),
            _forward(run, 3, b'{"data":[{"loss_fn_inputs":{"weights":{"data":[' + tokens + b"]}}}]}"),
            Body("/asample", packed(b'{"prompt":{"chunks":[{"tokens":[' + tokens[: 5 * MIB] + b"]}]}}"), _ZSTD),
            Body("/session_heartbeat", small, {}),
        ]

    await _send_for_a_run(foothold, bodies)


async def record_counts(foothold: Foothold) -> None:
    """Send millions of protobuf records of two bytes each (A3)."""

    def bodies(run: str) -> list[Body]:
        key = pb.ForwardBackwardRequest(model_id=run, loss_fn="cross_entropy")
        found = []
        for number, field in enumerate((b"\x1a\x00", b"\x1a\x02\x0a\x00", b"\x2a\x00", b"\x3a\x00"), start=1):
            key.seq_id = number
            found.append(
                Body("/forward_backward", packed(key.SerializeToString() + field * (4 * MIB)), _ZSTD | _PROTOBUF)
            )
        return found

    await _send_for_a_run(foothold, bodies)


async def expanding_bodies(foothold: Foothold) -> None:
    """Send kilobytes of zstd that expand to the limit of each route and beyond (A3)."""

    def bodies(run: str) -> list[Body]:
        key = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy").SerializeToString()
        # 60 MB are within the limit, in one field that no message has, or in sequences of a megabyte.
        unknown = key + b"\xa2\x06" + _varint(60 * MIB) + bytes(60 * MIB)
        datum = pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(MIB)))])
        known = pb.ForwardBackwardRequest(model_id=run, seq_id=2, loss_fn="cross_entropy", data=[datum] * 60)
        return [
            Body("/forward_backward", packed(unknown), _ZSTD | _PROTOBUF),
            Body("/forward_backward", packed(known.SerializeToString()), _ZSTD | _PROTOBUF),
            Body("/forward_backward", packed(bytes(512 * MIB)), _ZSTD | _PROTOBUF),
            Body("/telemetry", packed(bytes(512 * MIB)), _ZSTD),
        ]

    await _send_for_a_run(foothold, bodies)


async def long_texts(foothold: Foothold) -> None:
    """Send megabytes of text to tokenize, as prompts, conversations and stop strings (A4)."""
    text = "a b" * MIB
    odd = "\U0001f600 \u0130" * (MIB // 4)
    stops = ["ab" * 100_000] * 4
    chat = [{"role": "user", "content": text}]
    turns = [{"role": "user", "content": "a"}] * 8_000
    asked = [
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        ("/v1/completions", {"prompt": odd, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stop": stops}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": turns, "max_tokens": 1}),
    ]
    bodies = [(path, packed(json.dumps({"model": foothold.base_model, **body}).encode())) for path, body in asked]

    async def send(number: int) -> None:
        path, body = bodies[number % len(bodies)]
        await foothold.send("POST", path, body, _ZSTD)

    await again_and_again(_CONNECTIONS, send)


async def _send_for_a_run(foothold: Foothold, make: Callable[[str], Sequence[Body]]) -> None:
    """Send the bodies that ``make`` returns for a run of the attacker, over and over."""
    run = await foothold.run()
    bodies = await asyncio.to_thread(make, run)

    async def send(number: int) -> None:
        body = bodies[number % len(bodies)]
        await foothold.send("POST", PREFIX + body.path, body.content, body.headers)

    await again_and_again(_CONNECTIONS, send)


def _forward(run: str, seq_id: int, data: bytes) -> Body:
    """Return a JSON training request with ``data`` as its ``forward_input``."""
    key = b'{"model_id":"%s","seq_id":%d,"forward_input":' % (run.encode(), seq_id)
    return Body("/forward", packed(key + data + b"}"), _ZSTD)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
