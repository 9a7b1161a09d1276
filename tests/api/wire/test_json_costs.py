"""A JSON body costs no more than its route may hold everybody up for, however it is made."""

from time import thread_time

import pytest

from api.openai.chat import ChatRequest
from api.openai.completions import CompletionRequest
from api.route_bounds import JSON_DATA_BODY, METADATA_BODY, PROMPT_BODY, TEXT_BODY
from api.tinker.models import CreateModelRequest
from api.tinker.training import ForwardRequest
from api.wire.json_counts import DATA, MOST_DIGITS, SMALL, JsonBounds, check_json_counts
from api.wire.request_model import RequestModel, parse_json
from api.wire.tinker_requests import AsampleRequest
from contracts.errors import InvalidRequest
from tests.api.stalls import heap_set_aside

SECONDS = 2.0
"""Twenty times what weft promises, for a slow and busy machine. Unbounded, each body that costs members takes many seconds."""
TOKENS = b'{"forward_input":{"data":[{"model_input":{"chunks":[{"tokens":['
TENSORS = b'{"forward_input":{"data":[{"loss_fn_inputs":{'
CHAT = b'{"model":"a","messages":[{"role":"user","content":""}],'


def filled(before: bytes, item: bytes, after: bytes, size: int, most: int) -> bytes:
    """Return as many items as fit into ``size`` bytes, ``most`` at most; ``%d`` in the item is its number."""
    most = min(most, (size - len(before) - len(after)) // (len(item) + 6))
    items = (item % number for number in range(most)) if b"%d" in item else [item] * most
    return before + b",".join(items) + after


NEAR = {
    "good tokens": (ForwardRequest, DATA, filled(TOKENS, b"12345", b"]}]}}]}}", JSON_DATA_BODY, 590_000)),
    "large integers": (ForwardRequest, DATA, filled(TOKENS, b"1" * 20, b"]}]}}]}}", JSON_DATA_BODY, 590_000)),
    "texts as tokens": (
        ForwardRequest,
        DATA,
        filled(TOKENS, b'"%s"' % (b"1" * 4000), b"]}]}}]}}", JSON_DATA_BODY, 10**6),
    ),
    "bad tensors": (ForwardRequest, DATA, filled(TENSORS, b'"k%d":0', b"}}]}}", JSON_DATA_BODY, 32_000)),
    "bad losses": (
        ForwardRequest,
        DATA,
        filled(b'{"forward_input":{"loss_fn_config":{', b'"k%d":null', b"}}}", JSON_DATA_BODY, 32_000),
    ),
    "empty sequences": (
        ForwardRequest,
        DATA,
        filled(b'{"forward_input":{"data":[', b"{}", b"]}}", JSON_DATA_BODY, 16_000),
    ),
    "backslashes": (ForwardRequest, DATA, b'{"x":"' + b"\\\\" * (JSON_DATA_BODY // 2 - 20) + b'u0000"}'),
    "bad metadata": (
        CreateModelRequest,
        SMALL,
        filled(b'{"user_metadata":{', b'"k%d":0', b"}}", METADATA_BODY, 19_000),
    ),
    "bad biases": (ChatRequest, DATA, filled(CHAT + b'"logit_bias":{', b'"k%d":"x"', b"}}", TEXT_BODY, 590_000)),
    "lists": (ChatRequest, DATA, filled(CHAT + b'"response_format":{"x":[', b"[]", b"]}}", TEXT_BODY, 32_000)),
    "unknown fields": (ChatRequest, DATA, filled(CHAT, b'"k%d":0', b"}", TEXT_BODY, 590_000)),
    "prompts": (CompletionRequest, DATA, filled(b'{"model":"a","prompt":[', b'""', b"]}", PROMPT_BODY, 590_000)),
    "stops": (AsampleRequest, DATA, filled(b'{"sampling_params":{"stop":[', b'"a"', b"]}}", PROMPT_BODY, 590_000)),
}


@pytest.mark.parametrize("name", list(NEAR))
def test_no_body_within_its_routes_bounds_takes_long(name: str) -> None:
    model, bounds, body = NEAR[name]
    with heap_set_aside():
        began = thread_time()
        told = refusal(model, body, bounds)
        took = thread_time() - began
    assert took < SECONDS
    assert len(told) < 1000


def refusal(model: type[RequestModel], body: bytes, bounds: JsonBounds) -> str:
    """The reason for which the body is refused, or nothing."""
    try:
        parse_json(model, body, bounds)
    except InvalidRequest as error:
        return error.message
    return ""


LONG, LONGEST = b"1" * (MOST_DIGITS + 1), b"1" * MOST_DIGITS
SPACE = b" " * DATA.objects


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        (b'{"x":' + LONG + b"}", True),
        (b'{"x":0.' + LONG + b"}", True),
        (b'{"x":1e-' + LONG + b"}", True),
        (b'{"x":"\\\\","y":' + LONG + b"}", True),
        (b'{"x":"","y":-' + LONG, True),
        (b'{"x":' + LONGEST + b"." + LONGEST + b"}", False),
        (b'{"x":"' + LONG * 9 + b'"}', False),
        (b'{"x":"\\"' + LONG + b'"}', False),
        (b'{"x":"[\\\\\\"' + LONG + b',"}', False),
        (b'{"x":[' + b"1111111111111111111," * 9000 + b"1]}", False),
        (b'{"x":[' + b"0.00012345678901234567," * 9000 + b"1]}", False),
        (b'{"x":[' + b"11111111111111111111," * 9000 + b"1]}", True),
        (b'{"x":"' + b"11111111111111111111," * 9000 + b'"}', False),
    ],
)
def test_only_numbers_are_too_long(body: bytes, is_refused: bool) -> None:
    for content in (SPACE + body, body + SPACE):
        if is_refused:
            with pytest.raises(InvalidRequest, match=r"digits|beyond 64 bits"):
                check_json_counts(content, DATA)
        else:
            check_json_counts(content, DATA)


def test_names_are_counted_and_colons_in_texts_are_not() -> None:
    check_json_counts(b'{"x":"' + b'\\": ' * 100_000 + b'"}', DATA)
    with pytest.raises(InvalidRequest, match="32768 fields"):
        check_json_counts(b"{" + b'"x" \n: 0 ,' * 40_000 + b'"x":0}', DATA)


def test_lists_are_counted_and_brackets_in_texts_are_not() -> None:
    check_json_counts(b'{"x":"' + b'[\\"[' * 100_000 + b'","y":[]}', DATA)
    check_json_counts(b'{"x":[' + b"[]," * (DATA.lists - 2) + b"[]]}", DATA)
    with pytest.raises(InvalidRequest, match="32768 lists"):
        check_json_counts(b'{"x":[' + b"[]," * (DATA.lists - 1) + b"[]]}", DATA)
