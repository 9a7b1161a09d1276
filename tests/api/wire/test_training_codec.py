import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker import types

from api.wire import training_codec as codec
from api.wire import weft_wire_pb2 as pb
from contracts.errors import InvalidRequest
from contracts.losses import LossName
from tests.api.wire.support import (
    CONTEXT,
    FACTS,
    LIMITS,
    MAX_DATUMS,
    MAX_TARGETS,
    RUN,
    VOCABULARY,
    assert_equal_batches,
    datum,
    decoded,
    decoded_json,
    sdk_body,
)

TOKENS = [72, 105, 33]
NAN, INFINITY = float("nan"), float("inf")
POLICY = {"logprobs": [-1.0, -2.0, -3.0], "advantages": [1.0, 0.0, -1.0]}


def json_body(data: list[types.Datum], loss: str, config: dict[str, Any] | None, *, outer: str) -> bytes:
    """The JSON that SDKs up to 0.24 send for the same data; ``type`` and empty settings left out as 0.16 does."""
    entries = []
    for one in data:
        chunks = [{"tokens": list(chunk.tokens)} for chunk in one.model_input.chunks]
        inputs = {
            name: {
                "data": tensor.data,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "sparse_crow_indices": tensor.sparse_crow_indices,
                "sparse_col_indices": tensor.sparse_col_indices,
            }
            for name, tensor in one.loss_fn_inputs.items()
        }
        entries.append({"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs})
    inner = {"data": entries, "loss_fn": loss, "loss_fn_config": config}
    return json.dumps({outer: inner, "model_id": RUN, "seq_id": 1}).encode()


@st.composite
def sdk_data(draw: st.DrawFn) -> list[types.Datum]:
    """One to three sequences with 1-D, dense 2-D or sparse targets, and weights."""
    data = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 6))
        tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=length, max_size=length))
        k = draw(st.none() | st.integers(1, 6))
        shape = (length,) if k is None else (length, k)
        size = int(np.prod(shape))
        ids = draw(st.lists(st.sampled_from([0, 0, 0, 7, VOCABULARY - 1]), min_size=size, max_size=size))
        finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
        weights = draw(st.lists(st.just(0.0) | finite, min_size=size, max_size=size))
        inputs = {
            "target_tokens": torch.tensor(ids, dtype=torch.int64).reshape(shape),
            "weights": torch.tensor(weights, dtype=torch.float32).reshape(shape),
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
    return data


class TestRoundTrip:
    @given(sdk_data())
    def test_the_sdks_data_arrive(self, data: list[types.Datum]) -> None:
        batch = decoded(sdk_body(data))
        assert batch.loss.name is LossName.CROSS_ENTROPY
        for sent, arrived in zip(data, batch.data, strict=True):
            assert arrived.tokens.dtype == np.int64
            assert arrived.targets.dtype == np.int64
            assert arrived.inputs.keys() == {"weights"}
            assert arrived.inputs["weights"].dtype == np.float32
            np.testing.assert_array_equal(arrived.tokens, sent.model_input.to_ints())
            np.testing.assert_array_equal(arrived.targets, sent.loss_fn_inputs["target_tokens"].to_numpy())
            np.testing.assert_array_equal(arrived.inputs["weights"], sent.loss_fn_inputs["weights"].to_numpy())

    @given(sdk_data(), st.sampled_from(["forward_input", "forward_backward_input"]))
    def test_json_and_protobuf_mean_the_same(self, data: list[types.Datum], outer: str) -> None:
        assert_equal_batches(decoded(sdk_body(data)), decoded_json(json_body(data, "cross_entropy", None, outer=outer)))

    @pytest.mark.parametrize(
        ("loss", "config"),
        [
            ("importance_sampling", None),
            ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 2}),
            ("cispo", {"clip_high_threshold": 4.0}),
            ("dro", {"beta": 0.5}),
        ],
    )
    def test_every_loss_and_its_settings_arrive(self, loss: str, config: dict[str, float] | None) -> None:
        data = [datum(TOKENS, **POLICY)]
        batch = decoded(sdk_body(data, loss, config))
        assert (batch.loss.name, batch.loss.config) == (loss, config or {})
        assert batch.data[0].inputs.keys() == POLICY.keys()
        assert_equal_batches(batch, decoded_json(json_body(data, loss, config, outer="forward_backward_input")))

    def test_pieces_are_joined(self) -> None:
        chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
        pieces = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": TOKENS})
        assert decoded(sdk_body([pieces])).data[0].tokens.tolist() == [1, 2, 3]

    def test_settings_of_sdks_that_know_only_numbers_arrive(self) -> None:
        message = pb.ForwardBackwardRequest.FromString(sdk_body([datum(TOKENS, **POLICY)], "dro", {"beta": 0.25}))
        message.loss_fn_config_v2.clear()
        assert decoded(message.SerializeToString()).loss.config == {"beta": 0.25}

    def test_provenance_spans_are_tolerated(self) -> None:
        spans = [types.PromptProvenanceSpan(length=3, sequence_id="p", offset=0)]
        with_spans = datum(TOKENS).with_provenance(spans, spans)
        assert_equal_batches(decoded(sdk_body([with_spans])), decoded(sdk_body([datum(TOKENS)])))


class TestTolerance:
    def test_cross_entropy_needs_no_weights_and_drops_what_it_does_not_know(self) -> None:
        """A custom loss of SDKs up to 0.14 sends the user's own inputs along."""
        own = {"rewards": np.zeros((2, 2, 2), dtype=np.float32), "advantages": [NAN, 1.0, 1.0]}
        assert decoded(sdk_body([datum(TOKENS, **own)])).data[0].inputs == {}

    def test_weights_of_some_data_only_are_taken(self) -> None:
        batch = decoded(sdk_body([datum(TOKENS, weights=[1.0, 0.0, -1.0]), datum(TOKENS)]))
        assert [sorted(one.inputs) for one in batch.data] == [["weights"], []]

    def test_integer_weights_are_taken_as_numbers(self) -> None:
        weights = decoded(sdk_body([datum(TOKENS, weights=np.array([1, 0, -1]))])).data[0].inputs["weights"]
        assert (weights.dtype, weights.tolist()) == (np.float32, [1.0, 0.0, -1.0])


WIDE = np.zeros((3, MAX_TARGETS + 1), dtype=np.int64)
BAD_DATA: dict[str, tuple[types.Datum, list[str]]] = {
    "no tokens": (datum([], weights=[]), ["data[0].model_input", "empty"]),
    "too long": (datum([1] * (CONTEXT + 1)), ["data[0].model_input", str(CONTEXT + 1), f"holds {CONTEXT}", FACTS.name]),
    "token above": (datum([VOCABULARY]), ["data[0].model_input", f"0 to {VOCABULARY - 1}"]),
    "token below": (datum([-1]), ["data[0].model_input", f"0 to {VOCABULARY - 1}"]),
    "target above": (datum(TOKENS, target_tokens=[0, 0, VOCABULARY]), ["target_tokens", f"0 to {VOCABULARY - 1}"]),
    "target far above": (datum(TOKENS, target_tokens=[0, 0, 2**62]), ["target_tokens", f"0 to {VOCABULARY - 1}"]),
    "target below": (datum(TOKENS, target_tokens=[0, 0, -100]), ["target_tokens", f"0 to {VOCABULARY - 1}"]),
    "too few targets": (datum(TOKENS, target_tokens=[1, 2]), ["target_tokens", "[2]", "[3]"]),
    "cube of targets": (datum(TOKENS, target_tokens=np.zeros((3, 1, 1), np.int64)), ["target_tokens", "[3, 1, 1]"]),
    "no target a position": (datum(TOKENS, target_tokens=np.zeros((3, 0), np.int64)), ["target_tokens", "[3, 0]"]),
    "too many targets a position": (datum(TOKENS, target_tokens=WIDE), [str(MAX_TARGETS + 1), f"most {MAX_TARGETS}"]),
    "fractional targets": (datum(TOKENS, target_tokens=np.ones(3, np.float32)), ["target_tokens", "int64"]),
    "short weights": (datum(TOKENS, weights=[1.0]), ["weights", "[1]", "[3]"]),
    "weights of another layout": (datum(TOKENS, weights=np.ones((3, 1), np.float32)), ["weights", "[3, 1]", "[3]"]),
    "NaN": (datum(TOKENS, weights=[1.0, NAN, 1.0]), ["weights", "NaN"]),
    "infinity": (datum(TOKENS, weights=[1.0, 1.0, -INFINITY]), ["weights", "infinite"]),
    "image": (
        types.Datum(
            model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)]),
            loss_fn_inputs={"target_tokens": [1]},
        ),
        ["data[0].model_input", FACTS.name, "text only"],
    ),
    "no targets": (
        types.Datum(model_input=types.ModelInput.from_ints(TOKENS), loss_fn_inputs={}),
        ["target_tokens is missing"],
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("case", BAD_DATA)
    def test_bad_data_are_refused_by_name(self, case: str) -> None:
        one, words = BAD_DATA[case]
        with pytest.raises(InvalidRequest) as refused:
            decoded(sdk_body([one]))
        for word in words:
            assert word in refused.value.message

    def test_the_datum_is_named(self) -> None:
        with pytest.raises(InvalidRequest, match=r"data\[2\]\.loss_fn_inputs\.weights"):
            decoded(sdk_body([datum(TOKENS), datum(TOKENS), datum(TOKENS, weights=[NAN] * 3)]))

    @pytest.mark.parametrize(
        ("loss", "config", "inputs", "words"),
        [
            ("no_such_loss", None, POLICY, ["'no_such_loss'", *LossName]),
            ("", None, POLICY, [*LossName]),
            ("ppo", {"beta": 1.0}, POLICY, ["'beta'", "ppo", "clip_low_threshold, clip_high_threshold"]),
            ("cross_entropy", {"beta": 1.0}, {}, ["'beta'", "none"]),
            ("gspo", None, {"logprobs": [0.0] * 3}, ["gspo needs advantages"]),
            ("stable_reinforce", None, {}, ["stable_reinforce needs logprobs, advantages"]),
            ("stable_reinforce", {"ratio_cap": 0.5}, POLICY, ["ratio_cap must be 1 to 10000; got 0.5"]),
            ("stable_reinforce", {"kl_coeff": -1.0}, POLICY, ["kl_coeff must be 0 or more"]),
            *(
                (loss, {"clip_low_threshold": 1.3}, POLICY, ["data[0]", "is above", "1.3 and 1.2"])
                for loss in ("ppo", "gspo")
            ),
            ("cispo", {"clip_low_threshold": 4.5}, POLICY, ["data[0]", "is above", "4.5 and 4"]),
            ("ppo", None, {**POLICY, "clip_low_threshold": [0.8, 1.3, 0.8]}, ["data[0]", "is above"]),
            (
                "cispo",
                {"clip_low_threshold": 0.8},
                {**POLICY, "clip_high_threshold": [1.2, 1.2, 0.7]},
                ["data[0]", "is above"],
            ),
            ("dro", {"beta": NAN}, POLICY, ["loss_fn_config.beta", "finite"]),
            ("dro", {"beta": "0.5"}, POLICY, ["loss_fn_config.beta", "number"]),
            ("ppo", None, {"logprobs": [0.0] * 3}, ["data[0]", "advantages"]),
            ("importance_sampling", None, {}, ["logprobs, advantages"]),
            ("importance_sampling", None, {**POLICY, "weights": [1.0] * 3}, ["'weights'", "importance_sampling"]),
            ("ppo", None, {**POLICY, "advantages": [INFINITY, 0.0, 0.0]}, ["advantages", "infinite"]),
        ],
    )
    def test_bad_losses_are_refused_by_name(
        self, loss: str, config: dict[str, Any] | None, inputs: dict[str, Any], words: list[str]
    ) -> None:
        with pytest.raises(InvalidRequest) as refused:
            decoded(sdk_body([datum(TOKENS, **inputs)], loss, config))
        for word in words:
            assert word in refused.value.message

    @pytest.mark.parametrize(("count", "word"), [(0, "empty"), (MAX_DATUMS + 1, f"at most {MAX_DATUMS}")])
    def test_too_few_or_too_many_data_are_refused(self, count: int, word: str) -> None:
        with pytest.raises(InvalidRequest, match=word):
            decoded(sdk_body([datum(TOKENS)] * count))

    def test_sparse_tensors_may_not_grow_beyond_the_body_limit(self) -> None:
        cells = LIMITS.max_body_bytes // 4 // 3
        weights = torch.zeros(3, cells)
        weights[0, 0] = 1
        body = sdk_body([datum(TOKENS, weights=weights)] * 2)
        assert len(body) < 1000
        with pytest.raises(InvalidRequest, match=r"data\[1\].*weights.*100000 bytes"):
            decoded(body)

    def test_ragged_token_bytes_are_refused(self) -> None:
        message = pb.ForwardBackwardRequest.FromString(sdk_body([datum(TOKENS)]))
        message.data[0].model_input[0].encoded_text.tokens += b"x"
        with pytest.raises(InvalidRequest, match="int32"):
            decoded(message.SerializeToString())

    @pytest.mark.parametrize("chunk", [pb.Chunk(), pb.Chunk(dmel=pb.DmelChunk(dmel=b"x"))])
    def test_chunks_without_text_are_refused(self, chunk: pb.Chunk) -> None:
        message = pb.ForwardBackwardRequest.FromString(sdk_body([datum(TOKENS)]))
        message.data[0].model_input.append(chunk)
        with pytest.raises(InvalidRequest, match="text only"):
            decoded(message.SerializeToString())

    @given(st.binary(max_size=200))
    def test_garbage_is_refused(self, body: bytes) -> None:
        with pytest.raises(InvalidRequest):
            decoded(body)

    @given(st.data())
    def test_a_damaged_request_is_read_or_refused(self, data: st.DataObject) -> None:
        body = bytearray(sdk_body([datum(TOKENS, weights=[1.0, 0.0, 1.0])]))
        for _ in range(data.draw(st.integers(1, 4))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        try:
            batch = decoded(bytes(body))
        except InvalidRequest:
            return
        for one in batch.data:
            assert 0 <= one.tokens.min() <= one.tokens.max() < VOCABULARY
            assert all(np.isfinite(values).all() for values in one.inputs.values())


class TestJson:
    @pytest.mark.parametrize(
        "chunk",
        [
            {"data": "eA==", "format": "png", "type": "image"},
            {"location": "x", "format": "png"},
            {"dmel": "eA=="},
            {"tokens": None},
            {},
        ],
    )
    def test_chunks_without_text_are_refused(self, chunk: dict[str, Any]) -> None:
        passed = {"data": [{"model_input": {"chunks": [chunk]}}], "loss_fn": "cross_entropy"}
        body = {"model_id": "run", "seq_id": 1, "forward_input": passed}
        with pytest.raises(InvalidRequest, match="text only"):
            decoded_json(json.dumps(body).encode())

    @pytest.mark.parametrize("tokens", [[2**31], [2**63], [-(2**70)]])
    def test_any_integer_may_come_as_a_token_and_be_refused(self, tokens: list[int]) -> None:
        targets = {"target_tokens": {"data": [1], "dtype": "int64"}}
        entry = {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": targets}
        body = {"model_id": "run", "seq_id": 1, "forward_input": {"data": [entry], "loss_fn": "cross_entropy"}}
        with pytest.raises(InvalidRequest, match=r"data\[0\]\.model_input"):
            decoded_json(json.dumps(body).encode())

    def test_nan_in_json_is_refused_by_name(self) -> None:
        body = json_body([datum(TOKENS, weights=[NAN] * 3)], "cross_entropy", None, outer="forward_input")
        with pytest.raises(InvalidRequest, match="weights has NaN"):
            decoded_json(body)


class TestKeyOfBeginning:
    @given(st.integers(0, 2**31 - 1), st.integers(20, 400))
    def test_the_key_is_found_in_any_beginning_that_holds_it(self, seq_id: int, length: int) -> None:
        body = sdk_body([datum(TOKENS * 20)], seq_id=seq_id)
        assert codec.key_of_beginning(body[:length]) == (RUN, seq_id) if seq_id else True

    @pytest.mark.parametrize(
        "message",
        [
            pb.ForwardBackwardRequest(seq_id=3),
            pb.ForwardBackwardRequest(model_id=RUN, loss_fn="cross_entropy"),
            pb.ForwardBackwardRequest(model_id=RUN, seq_id=-1),
            pb.ForwardBackwardRequest(model_id="nul\0", seq_id=1),
            pb.ForwardBackwardRequest(),
        ],
    )
    def test_no_usable_key_is_none(self, message: pb.ForwardBackwardRequest) -> None:
        assert codec.key_of_beginning(message.SerializeToString()) is None

    @given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda tail: b"\x0a" + tail))
    def test_noise_gives_none_or_a_key_that_a_row_can_hold(self, noise: bytes) -> None:
        found = codec.key_of_beginning(noise)
        assert found is None or 0 <= found[1] < 2**31

    @pytest.mark.parametrize(
        "message",
        [
            pb.ForwardBackwardRequest(seq_id=3),
            pb.ForwardBackwardRequest(model_id=RUN, seq_id=-1),
            pb.ForwardBackwardRequest(model_id="nul\0", seq_id=1),
        ],
    )
    def test_no_usable_key_of_a_whole_message_is_refused(self, message: pb.ForwardBackwardRequest) -> None:
        with pytest.raises(InvalidRequest, match="model_id"):
            codec.key_of(message)
