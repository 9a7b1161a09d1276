import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from api.wire.results import JSON, PROTOBUF, encode_result
from contracts.operations import (
    ExternalWeightsSaved,
    ForwardBackwardOutput,
    ModelCreated,
    ModelUnloaded,
    OperationKind,
    OptimStepped,
    Result,
    SampledSequence,
    SampleOutput,
    SamplerWeightsSaved,
    TopkLogprobs,
    WeightsLoaded,
    WeightsSaved,
)
from contracts.prompt_cells import PromptAltTokens, PromptCells

EMPTY_CELL = (0, -99999.0)
LOGPROBS = npst.arrays(
    np.float32,
    npst.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5).filter(lambda shape: shape[1:] != (0,)),
    elements=st.floats(-100, 0, width=32),
)
METRICS = {"loss:sum": 1.25, "tokens:sum": 7.0}


def as_sdk_pass(result: ForwardBackwardOutput, accept: str = PROTOBUF):
    encoded = encode_result(OperationKind.FORWARD_BACKWARD, result, accept=accept)
    assert encoded.media_type == PROTOBUF
    return deserialize_forward_backward_output(encoded.body)


def as_sdk_sample(result: SampleOutput):
    encoded = encode_result(OperationKind.SAMPLE, result, accept=PROTOBUF)
    assert encoded.media_type == PROTOBUF
    return deserialize_sample_response(encoded.body)


def as_json(kind: OperationKind, result: Result, accept: str = JSON):
    encoded = encode_result(kind, result, accept=accept)
    assert encoded.media_type == JSON
    return json.loads(encoded.body, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def topk(rows: list[list[tuple[int, float]]]) -> TopkLogprobs:
    cells = np.array(rows, dtype=np.float64).reshape(len(rows), -1, 2)
    return TopkLogprobs(cells[..., 0].astype(np.int32), cells[..., 1].astype(np.float32))


class TestPasses:
    @given(st.lists(LOGPROBS, max_size=6))
    def test_the_sdk_reads_every_array_in_order(self, logprobs: list[np.ndarray]) -> None:
        """1-D and 2-D, of different K, of no length, in any order."""
        read = as_sdk_pass(ForwardBackwardOutput(logprobs, METRICS))
        assert read.metrics == METRICS
        assert read.loss_fn_output_type == "ArrayRecord"
        assert [list(one) for one in read.loss_fn_outputs] == [["logprobs"]] * len(logprobs)
        for sent, output in zip(logprobs, read.loss_fn_outputs, strict=True):
            assert output["logprobs"].dtype == "float32"
            assert output["logprobs"].shape == list(sent.shape)
            np.testing.assert_array_equal(output["logprobs"].to_numpy(), sent)

    def test_arrays_that_are_no_block_of_memory_arrive(self) -> None:
        turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
        read = as_sdk_pass(ForwardBackwardOutput([turned], METRICS))
        np.testing.assert_array_equal(read.loss_fn_outputs[0]["logprobs"].to_numpy(), turned)

    def test_metrics_that_are_no_numbers_are_left_out(self) -> None:
        result = ForwardBackwardOutput([], {**METRICS, "odd:mean": math.nan, "far:max": math.inf})
        assert as_sdk_pass(result).metrics == METRICS
        assert as_json(OperationKind.FORWARD, result)["metrics"] == METRICS

    def test_old_sdks_get_flat_json(self) -> None:
        result = ForwardBackwardOutput([np.full((2, 2), -0.5, np.float32), np.zeros(0, np.float32)], METRICS)
        assert as_json(OperationKind.FORWARD_BACKWARD, result) == {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [
                {"logprobs": {"data": [-0.5] * 4, "dtype": "float32", "shape": [2, 2]}},
                {"logprobs": {"data": [], "dtype": "float32", "shape": [0]}},
            ],
            "metrics": METRICS,
        }

    @pytest.mark.parametrize("accept", [PROTOBUF, f"{PROTOBUF}, {JSON}", f"{JSON}, {PROTOBUF}"])
    def test_protobuf_goes_to_whoever_takes_it(self, accept: str) -> None:
        assert as_sdk_pass(ForwardBackwardOutput([], METRICS), accept).loss_fn_outputs == []

    @pytest.mark.parametrize("accept", ["", "*/*", JSON])
    def test_json_goes_to_the_others(self, accept: str) -> None:
        as_json(OperationKind.SAMPLE, SampleOutput([]), accept)


class TestSamples:
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["stop", "length"]),
                st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)), max_size=5),
            ),
            max_size=4,
        ),
        st.integers(0, 1000),
    )
    def test_the_sdk_reads_every_sequence(self, drawn, hits: int) -> None:
        sequences = [
            SampledSequence(
                reason,
                np.array([token for token, _ in cells], dtype=np.int32),
                np.array([value for _, value in cells], dtype=np.float32),
            )
            for reason, cells in drawn
        ]
        read = as_sdk_sample(SampleOutput(sequences, prompt_cache_hit_tokens=hits))
        assert [one.stop_reason for one in read.sequences] == [reason for reason, _ in drawn]
        for sequence, (_, cells) in zip(read.sequences, drawn, strict=True):
            assert sequence.tokens == [token for token, _ in cells]
            assert sequence.logprobs == ([value for _, value in cells] or None)
            assert sequence.topk_logprobs is None
        assert read.prompt_cache_hit_tokens == hits
        assert read.prompt_logprobs is None
        assert read.topk_prompt_logprobs is None

    def test_the_sdk_reads_prompt_and_topk_logprobs(self) -> None:
        sampled = topk([[(4, -0.25), (5, -0.5)], [(6, -1.0), EMPTY_CELL]])
        prompt = topk([[EMPTY_CELL, EMPTY_CELL], [(1, -2.0), (2, -4.0)]])
        sequence = SampledSequence("stop", np.array([4, 6], np.int32), np.array([-0.25, -1], np.float32), sampled)
        read = as_sdk_sample(SampleOutput([sequence], np.array([np.nan, -0.75], np.float32), prompt))
        assert read.prompt_logprobs == [None, -0.75]
        assert read.topk_prompt_logprobs == [None, [(1, -2.0), (2, -4.0)]]
        assert read.sequences[0].topk_logprobs == [[(4, -0.25), (5, -0.5)], [(6, -1.0)]]

    def test_old_sdks_get_json(self) -> None:
        prompt = topk([[EMPTY_CELL, EMPTY_CELL], [(1, -2.0), EMPTY_CELL]])
        sequence = SampledSequence("length", np.array([4], np.int32), np.array([-0.25], np.float32))
        result = SampleOutput([sequence], np.array([np.nan, -0.75], np.float32), prompt)
        assert as_json(OperationKind.SAMPLE, result) == {
            "type": "sample",
            "sequences": [{"stop_reason": "length", "tokens": [4], "logprobs": [-0.25]}],
            "prompt_cache_hit_tokens": 0,
            "prompt_logprobs": [None, -0.75],
            "topk_prompt_logprobs": [None, [[1, -2.0]]],
        }


RUN, PATH = "s:train:0", "tinker://s:train:0/weights/a"


@pytest.mark.parametrize("accept", [JSON, PROTOBUF])
@pytest.mark.parametrize(
    ("kind", "result", "content"),
    [
        (OperationKind.CREATE_MODEL, ModelCreated(RUN), {"model_id": RUN, "type": "create_model"}),
        (OperationKind.UNLOAD_MODEL, ModelUnloaded(RUN), {"model_id": RUN, "type": "unload_model"}),
        (OperationKind.OPTIM_STEP, OptimStepped({"a:mean": 1.0, "b": math.nan}), {"metrics": {"a:mean": 1.0}}),
        (OperationKind.SAVE_WEIGHTS, WeightsSaved(PATH), {"path": PATH, "type": "save_weights"}),
        (
            OperationKind.SAVE_WEIGHTS_EXTERNAL,
            ExternalWeightsSaved(PATH, 5),
            {"path": PATH, "size_bytes": 5, "type": "save_weights_external"},
        ),
        (
            OperationKind.LOAD_WEIGHTS,
            WeightsLoaded(PATH, RUN),
            {"path": PATH, "model_id": RUN, "type": "load_weights"},
        ),
        (
            OperationKind.SAVE_WEIGHTS_FOR_SAMPLER,
            SamplerWeightsSaved(path=PATH),
            {"path": PATH, "type": "save_weights_for_sampler"},
        ),
        (
            OperationKind.SAVE_WEIGHTS_FOR_SAMPLER,
            SamplerWeightsSaved(sampling_session_id="s:sample:1"),
            {"sampling_session_id": "s:sample:1", "type": "save_weights_for_sampler"},
        ),
    ],
)
def test_everything_else_is_json_whatever_is_accepted(
    kind: OperationKind, result: Result, content: dict[str, object], accept: str
) -> None:
    assert as_json(kind, result, accept) == content


def with_cells(cells: PromptCells) -> SampleOutput:
    drawn = PromptAltTokens(np.array([[1, 2], [3, 4]]), np.array([[-1, -2], [-3, -4]], np.float32))
    return SampleOutput([], target_prompt_logprobs=cells, prompt_alt_tokens=drawn, prompt_cache_hit_tokens=16)


def test_scores_of_targets_keep_the_layout_of_the_request() -> None:
    dense = PromptCells(np.array([[7, -1], [-1, 8]]), 2).scored(np.array([-0.5, -1.5], np.float32))
    crow, col = np.array([0, 1, 1]), np.array([3])
    sparse = PromptCells(np.array([7]), 9, crow, col).scored(np.array([-0.25], np.float32))
    found = as_sdk_sample(with_cells(dense))
    assert found.target_prompt_logprobs.to_numpy().tolist() == [[-0.5, 0], [0, -1.5]]
    assert found.prompt_alt_tokens.tokens.to_numpy().tolist() == [[1, 2], [3, 4]]
    assert found.prompt_alt_tokens.logprobs.to_numpy().tolist() == [[-1, -2], [-3, -4]]
    assert found.prompt_cache_hit_tokens == 16
    listed = as_sdk_sample(with_cells(sparse)).target_prompt_logprobs
    assert (listed.shape, list(listed.data), listed.sparse_col_indices) == ([2, 9], [-0.25], [3])
    plain = as_json(OperationKind.SAMPLE, with_cells(sparse))
    assert plain["target_prompt_logprobs"]["sparse_crow_indices"] == [0, 1, 1]
    assert plain["prompt_alt_tokens"]["tokens"]["data"] == [1, 2, 3, 4]
