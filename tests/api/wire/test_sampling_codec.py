import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.types.sample_request import SampleRequest as SdkSampleRequest

from api.wire.request_model import parse_json
from api.wire.sample_checks import MAX_STOP_LENGTH, MAX_STOPS
from api.wire.sampling_codec import sample_request
from api.wire.tinker_requests import AsampleRequest, JsonSamplingParams
from contracts.codec import decode_payload, encode
from contracts.errors import InvalidRequest
from contracts.operations import OperationKind, SampleRequest, SamplingParams
from contracts.sample_demand import demand_of
from tests.api.wire.support import CONTEXT, FACTS, LIMITS, MAX_SAMPLES, MAX_TOPK, VOCABULARY

PROMPT = [5, 6, 7]


def asked(params: dict[str, Any] | None = None, **fields: Any) -> SampleRequest:
    body = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": params or {}, **fields}
    return sample_request(parse_json(AsampleRequest, json.dumps(body).encode()), FACTS, LIMITS)


def test_the_sdks_request_arrives() -> None:
    params = types.SamplingParams(max_tokens=4, seed=3, stop=["x"], temperature=0.5, top_k=8, top_p=0.5)
    request = SdkSampleRequest(
        num_samples=2,
        prompt=types.ModelInput.from_ints(PROMPT),
        sampling_params=params,
        sampling_session_id="s:sample:0",
        seq_id=0,
        prompt_logprobs=True,
        topk_prompt_logprobs=1,
        topk_sample_logprobs=2,
        prompt_logprobs_last_n=2,
    )
    body = request.model_dump_json(exclude_none=True).encode()
    arrived = sample_request(parse_json(AsampleRequest, body), FACTS, LIMITS)
    assert (arrived.prompt.dtype, arrived.prompt.tolist()) == (np.int64, PROMPT)
    assert arrived.params == SamplingParams(4, 3, ["x"], [], 0.5, 8, 0.5)
    assert (arrived.num_samples, arrived.prompt_logprobs, arrived.prompt_logprobs_last_n) == (2, True, 2)
    assert (arrived.topk_prompt_logprobs, arrived.topk_sample_logprobs) == (1, 2)


def test_nulls_and_what_is_left_out_mean_the_defaults() -> None:
    nulls = dict.fromkeys(["max_tokens", "seed", "stop", "temperature", "top_k", "top_p"])
    fields = dict.fromkeys(["num_samples", "prompt_logprobs", "topk_prompt_logprobs", "prompt_logprobs_last_n"])
    for arrived in (asked(), asked(nulls, **fields), asked(sampling_params=None)):
        assert arrived.params == SamplingParams()
        assert (arrived.num_samples, arrived.prompt_logprobs, arrived.topk_prompt_logprobs) == (1, False, 0)


@pytest.mark.parametrize(
    ("stop", "strings", "tokens"),
    [
        (None, None, None),
        ([], [], []),
        ("\n\n", ["\n\n"], []),
        (["a", "b"], ["a", "b"], []),
        ([0, VOCABULARY - 1], [], [0, VOCABULARY - 1]),
    ],
)
def test_stops_in_every_form(stop: object, strings: list[str] | None, tokens: list[int] | None) -> None:
    params = asked({"stop": stop}).params
    assert (params.stop_strings, params.stop_tokens) == (strings, tokens)


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_top_k_is_off(top_k: int) -> None:
    assert asked({"top_k": top_k}).params.top_k == -1


def test_the_whole_context_may_be_used() -> None:
    most = CONTEXT - len(PROMPT) + 1
    assert asked({"max_tokens": most}).params.max_tokens == most
    assert asked({"temperature": 0, "top_p": 1}).params.temperature == 0


def cells(data: list[int], shape: list[int], **sparse: list[int]) -> dict[str, Any]:
    return {"data": data, "dtype": "int64", "shape": shape, **sparse}


@pytest.mark.parametrize("columns", [2, 151_936])
def test_sparse_targets_arrive_sparse(columns: int) -> None:
    sparse = cells([7, 8], [2, columns], sparse_crow_indices=[0, 0, 2], sparse_col_indices=[0, columns - 1])
    arrived = asked(target_prompt_logprobs=sparse, prompt_alt_tokens_k=2)
    found = arrived.target_prompt_logprobs
    assert found is not None
    positions, tokens = found.wanted()
    assert (positions.tolist(), tokens.tolist()) == ([2, 2], [7, 8])
    assert arrived.prompt_alt_tokens_k == 2
    assert demand_of(arrived, CONTEXT).work == CONTEXT - len(PROMPT) + 2 + 2 * 2


ONE = {"chunks": [{"tokens": [1]}]}
OVERFULL = {"chunks": [{"tokens": [1] * (CONTEXT + 1)}]}
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "no samples": ({}, {"num_samples": 0}, ["num_samples", f"1 to {MAX_SAMPLES}"]),
    "too many samples": ({}, {"num_samples": MAX_SAMPLES + 1}, ["num_samples", f"1 to {MAX_SAMPLES}"]),
    "no tokens": ({"max_tokens": 0}, {}, ["max_tokens", "1 or more"]),
    "beyond the context": (
        {"max_tokens": CONTEXT - 1},
        {},
        ["prompt (3", f"max_tokens ({CONTEXT - 1})", str(CONTEXT + 2), f"holds {CONTEXT}", FACTS.name],
    ),
    "far beyond the context": ({"max_tokens": 2**80}, {}, ["max_tokens"]),
    "a prompt beyond the context": ({}, {"prompt": OVERFULL}, ["prompt", f"holds {CONTEXT}"]),
    "an empty prompt": ({}, {"prompt": {"chunks": [{"tokens": []}]}}, ["prompt is empty"]),
    "a token outside": ({}, {"prompt": {"chunks": [{"tokens": [VOCABULARY]}]}}, ["prompt", f"{VOCABULARY - 1}"]),
    "an image": ({}, {"prompt": {"chunks": [{"data": "eA==", "format": "png"}]}}, ["prompt", "text only"]),
    "NaN temperature": ({"temperature": float("nan")}, {}, ["temperature", "finite"]),
    "a temperature that vLLM refuses": ({"temperature": 2.01}, {}, ["temperature", "0 (greedy), or a number from"]),
    "a temperature that vLLM changes": ({"temperature": 0.001}, {}, ["temperature", "0.01"]),
    "negative temperature": ({"temperature": -0.1}, {}, ["temperature"]),
    "top_k below": ({"top_k": -2}, {}, ["top_k"]),
    "top_k above": ({"top_k": 2**70}, {}, ["top_k"]),
    "top_p of nothing": ({"top_p": 0}, {}, ["top_p"]),
    "top_p above": ({"top_p": 1.01}, {}, ["top_p"]),
    "NaN top_p": ({"top_p": float("nan")}, {}, ["top_p"]),
    "seed": ({"seed": 2**64}, {}, ["seed", "64 bits"]),
    "an empty stop": ({"stop": ""}, {}, ["stop", "empty"]),
    "an empty stop in a list": ({"stop": ["a", ""]}, {}, ["stop", "empty"]),
    "a stop token outside": ({"stop": [VOCABULARY]}, {}, ["stop", f"0 to {VOCABULARY - 1}"]),
    "long stop": ({"stop": ["x" * (MAX_STOP_LENGTH + 1)]}, {}, ["stop", str(MAX_STOP_LENGTH)]),
    "too many stops": ({"stop": [1] * (MAX_STOPS + 1)}, {}, ["stop", str(MAX_STOPS)]),
    "mixed stops": ({"stop": ["a", 1]}, {}, ["stop"]),
    "top-k of the prompt": ({}, {"topk_prompt_logprobs": MAX_TOPK + 1}, ["topk_prompt_logprobs", f"0 to {MAX_TOPK}"]),
    "top-k of samples": ({}, {"topk_sample_logprobs": -1}, ["topk_sample_logprobs", f"0 to {MAX_TOPK}"]),
    "last_n alone": ({}, {"prompt_logprobs_last_n": 1}, ["prompt_logprobs_last_n", "prompt_logprobs"]),
    "last_n of nothing": ({}, {"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, ["last_n", "1 to 2"]),
    "last_n of all": ({}, {"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, ["last_n", "1 to 2"]),
    "targets without a shape": ({}, {"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, ["shape", "[]"]),
    "targets that are no ids": ({}, {"target_prompt_logprobs": {"data": [1.5]}}, ["target_prompt_logprobs", "int64"]),
    "a row too few": ({}, {"target_prompt_logprobs": cells([1], [1, 1])}, ["has 1 rows", "must have 2"]),
    "a target outside": ({}, {"target_prompt_logprobs": cells([1, VOCABULARY], [2, 1])}, [f"0 to {VOCABULARY - 1}"]),
    "a target below": ({}, {"target_prompt_logprobs": cells([1, -2], [2, 1])}, ["or -1 for none"]),
    "targets of nothing": ({}, {"target_prompt_logprobs": cells([-1, -1], [2, 1])}, ["names no token"]),
    "too many targets": (
        {},
        {"target_prompt_logprobs": cells([1] * 2 * (MAX_TOPK + 1), [2, MAX_TOPK + 1])},
        [f"names {MAX_TOPK + 1} tokens", f"at most {MAX_TOPK}"],
    ),
    "targets whose indices lie": (
        {},
        {"target_prompt_logprobs": cells([1], [2, 1], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[5])},
        ["do not describe a 2 x 1 matrix"],
    ),
    "a matrix beyond numbers": (
        {},
        {"target_prompt_logprobs": cells([1], [2, 2**62], sparse_crow_indices=[0, 1, 1], sparse_col_indices=[5])},
        ["too large"],
    ),
    "too many draws": ({}, {"prompt_alt_tokens_k": MAX_TOPK + 1}, ["prompt_alt_tokens_k", f"0 to {MAX_TOPK}"]),
    "draws at no position": ({}, {"prompt": ONE, "prompt_alt_tokens_k": 1}, ["prompt_alt_tokens_k", "only token"]),
}


def test_the_rows_of_targets_are_compared_with_the_prompt_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("the targets were converted")

    monkeypatch.setattr("api.wire.sampling_codec.cells_from_lists", build)
    many = cells([1] * 9, [9, 1], sparse_crow_indices=list(range(10)), sparse_col_indices=[0] * 9)
    with pytest.raises(InvalidRequest, match="has 9 rows; it must have 2"):
        asked(target_prompt_logprobs=many)


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused_by_name(case: str) -> None:
    params, fields, words = BAD[case]
    with pytest.raises(InvalidRequest) as refused:
        asked(params, **fields)
    for word in words:
        assert word in refused.value.message


def test_last_n_of_a_prompt_of_one_token_is_refused() -> None:
    """The only token of such a prompt has no logprob."""
    with pytest.raises(InvalidRequest, match="prompt_logprobs_last_n"):
        asked(prompt=ONE, prompt_logprobs=True, prompt_logprobs_last_n=1)


JSON_VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text("a\0", max_size=3)
    | st.lists(st.integers(), max_size=3)
)


@given(
    st.dictionaries(st.sampled_from(list(JsonSamplingParams.model_fields)), JSON_VALUES, max_size=3),
    st.dictionaries(st.sampled_from(list(AsampleRequest.model_fields)), JSON_VALUES, max_size=3),
)
def test_whatever_is_asked_is_refused_or_can_be_recorded(params: dict[str, Any], fields: dict[str, Any]) -> None:
    try:
        payload = asked(params, **fields)
    except InvalidRequest:
        return
    kept = decode_payload(OperationKind.SAMPLE, encode(payload))
    assert isinstance(kept, SampleRequest)
    assert kept.params == payload.params
