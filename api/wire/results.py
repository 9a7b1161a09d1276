"""Conversion of operations' results to response bodies for the SDK: protobuf if ``Accept`` names it, else JSON."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from api.wire import weft_wire_pb2 as pb
from contracts.operations import (
    EMPTY_LOGPROB,
    ExternalWeightsSaved,
    ForwardBackwardOutput,
    ModelCreated,
    ModelUnloaded,
    OperationKind,
    OptimStepped,
    Result,
    SampleOutput,
    SamplerWeightsSaved,
    TopkLogprobs,
    WeightsLoaded,
    WeightsSaved,
)
from contracts.prompt_cells import PromptCells

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
_ARRAY_RECORD = "ArrayRecord"


@dataclass(frozen=True, slots=True)
class EncodedResult:
    """Body of a response and its media type."""

    body: bytes
    media_type: str


def encode_result(kind: OperationKind, result: Result, *, accept: str) -> EncodedResult:
    """Encode ``result``. Samples and passes are protobuf if ``accept`` names it; every other result is JSON."""
    wants_protobuf = PROTOBUF in accept
    match result:
        case ForwardBackwardOutput() if wants_protobuf:
            return EncodedResult(_pass_message(result).SerializeToString(), PROTOBUF)
        case SampleOutput() if wants_protobuf:
            return EncodedResult(_sample_message(result).SerializeToString(), PROTOBUF)
    return EncodedResult(orjson.dumps(_json(kind, result)), JSON)


def _json(kind: OperationKind, result: Result) -> dict[str, Any]:
    match result:
        case ModelCreated() | ModelUnloaded():
            return {"model_id": result.model_id, "type": kind}
        case OptimStepped():
            return {"metrics": _finite(result.metrics)}
        case WeightsSaved():
            return {"path": result.path, "type": kind}
        case ExternalWeightsSaved():
            return {"path": result.path, "size_bytes": result.size_bytes, "type": kind}
        case WeightsLoaded():
            return {"path": result.path, "model_id": result.model_id, "type": kind}
        case SamplerWeightsSaved():
            named = {"path": result.path, "sampling_session_id": result.sampling_session_id}
            return {"type": kind, **{name: value for name, value in named.items() if value is not None}}
        case ForwardBackwardOutput():
            outputs = [_piece({"logprobs": _json_tensor(logprobs)}) for logprobs in result.logprobs]
            return {
                "loss_fn_output_type": _ARRAY_RECORD,
                "loss_fn_outputs": outputs,
                "metrics": _finite(result.metrics),
            }
        case SampleOutput():
            return _json_sample(result)


def _piece(content: dict[str, Any]) -> orjson.Fragment:
    """Return a part of an answer as JSON. The interpreter's lock is held for one part at a time, not for all of them."""
    return orjson.Fragment(orjson.dumps(content))


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _json_tensor(values: np.ndarray) -> dict[str, Any]:
    return {"data": values.ravel().tolist(), "dtype": "float32", "shape": list(values.shape)}


def _json_sample(result: SampleOutput) -> dict[str, Any]:
    content: dict[str, Any] = {
        "type": OperationKind.SAMPLE,
        "sequences": [
            _piece(
                {
                    "stop_reason": sequence.stop_reason,
                    "tokens": sequence.tokens.tolist(),
                    "logprobs": sequence.logprobs.tolist(),
                }
            )
            for sequence in result.sequences
        ],
        "prompt_cache_hit_tokens": result.prompt_cache_hit_tokens,
    }
    if result.prompt_logprobs is not None:
        content["prompt_logprobs"] = [None if math.isnan(value) else value for value in result.prompt_logprobs.tolist()]
    if result.topk_prompt_logprobs is not None:
        content["topk_prompt_logprobs"] = _json_topk(result.topk_prompt_logprobs)
    if result.target_prompt_logprobs is not None:
        content["target_prompt_logprobs"] = _json_cells(result.target_prompt_logprobs)
    if (drawn := result.prompt_alt_tokens) is not None:
        tokens = _json_tensor(drawn.tokens) | {"dtype": "int64"}
        content["prompt_alt_tokens"] = {"tokens": tokens, "logprobs": _json_tensor(drawn.logprobs)}
    return content


def _json_cells(cells: PromptCells) -> dict[str, Any]:
    content = _json_tensor(cells.values) | {"shape": _shape(cells)}
    if cells.crow is not None and cells.col is not None:
        content |= {"sparse_crow_indices": cells.crow.tolist(), "sparse_col_indices": cells.col.tolist()}
    return content


def _shape(cells: PromptCells) -> list[int]:
    rows = len(cells.values) if cells.crow is None else len(cells.crow) - 1
    return [rows, cells.columns]


def _json_topk(topk: TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    rows = zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True)
    cells = [
        [(token, value) for token, value in zip(ids, values, strict=True) if value > EMPTY_LOGPROB]
        for ids, values in rows
    ]
    return [row or None for row in cells]


def _pass_message(result: ForwardBackwardOutput) -> pb.ForwardBackwardOutput:
    """Return the protobuf message of a pass.

    A record holds neighbouring data of the same trailing shape, because its tensor has only one trailing shape.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type=_ARRAY_RECORD, metrics=_finite(result.metrics))
    start = 0
    while start < len(result.logprobs):
        trailing = result.logprobs[start].shape[1:]
        end = start
        while end < len(result.logprobs) and result.logprobs[end].shape[1:] == trailing:
            end += 1
        group = result.logprobs[start:end]
        offsets = np.zeros(len(group) + 1, dtype="<i8")
        np.cumsum([array.size * 4 for array in group], out=offsets[1:])
        record = message.loss_fn_outputs.add(type_tag=_ARRAY_RECORD, num_datums=len(group))
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(
                data=b"".join(_floats(array) for array in group),
                offsets=offsets.tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=trailing,
            )
        )
        start = end
    return message


def _sample_message(result: SampleOutput) -> pb.SampleResponse:
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        is_stop = sequence.stop_reason == "stop"
        sampled = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if is_stop else pb.STOP_REASON_LENGTH,
            tokens=_integers(sequence.tokens),
            logprobs=_floats(sequence.logprobs),
        )
        if sequence.topk_logprobs is not None:
            sampled.topk_sampled_logprobs.CopyFrom(_topk_message(sequence.topk_logprobs))
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = _floats(result.prompt_logprobs)
    if result.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk_message(result.topk_prompt_logprobs))
    if result.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_cells_message(result.target_prompt_logprobs))
    if (drawn := result.prompt_alt_tokens) is not None:
        tokens = pb.Tensor(dense=_wide(drawn.tokens), dtype=pb.DTYPE_INT64, shape=drawn.tokens.shape)
        logprobs = pb.Tensor(dense=_floats(drawn.logprobs), dtype=pb.DTYPE_FLOAT32, shape=drawn.logprobs.shape)
        message.prompt_alt_tokens.CopyFrom(pb.PromptAltTokens(tokens=tokens, logprobs=logprobs))
    return message


def _cells_message(cells: PromptCells) -> pb.Tensor:
    values = _floats(cells.values)
    message = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=_shape(cells))
    if cells.crow is None or cells.col is None:
        message.dense = values
    else:
        message.sparse_csr.CopyFrom(
            pb.SparseCsr(values=values, crow_indices=_wide(cells.crow), col_indices=_wide(cells.col))
        )
    return message


def _topk_message(topk: TopkLogprobs) -> pb.TopkLogprobs:
    length, k = topk.token_ids.shape
    return pb.TopkLogprobs(token_ids=_integers(topk.token_ids), logprobs=_floats(topk.logprobs), k=k, length=length)


def _floats(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def _wide(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values, dtype="<i8").tobytes()


def _integers(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values, dtype="<i4").tobytes()
