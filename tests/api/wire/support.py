"""A base model and limits for the codecs, and requests built by the SDK's own code."""

from pathlib import Path
from typing import Any

import numpy as np
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from api.tinker.training import ForwardRequest
from api.wire import training_codec
from api.wire.request_model import parse_json
from contracts.base_model import BaseModelFacts
from contracts.operations import TrainingBatch
from store.settings import Settings

CONTEXT, VOCABULARY = 64, 300
FACTS = BaseModelFacts(
    name="test/tiny",
    path=Path("tiny"),
    architecture="Qwen3ForCausalLM",
    context_length=CONTEXT,
    vocabulary_size=VOCABULARY,
    tokenizer_id=None,
)
MAX_DATUMS, MAX_TARGETS, MAX_SAMPLES, MAX_TOPK = 8, 16, 4, 5
LIMITS = Settings(
    max_body_bytes=100_000,
    max_datums=MAX_DATUMS,
    max_targets_per_position=MAX_TARGETS,
    max_samples=MAX_SAMPLES,
    max_topk_logprobs=MAX_TOPK,
)
RUN = "s:train:0"


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """An SDK datum; ``target_tokens`` are the tokens unless given."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": list(tokens), **inputs}
    )


def sdk_body(
    data: list[types.Datum], loss: str = "cross_entropy", config: dict[str, Any] | None = None, *, seq_id: int = 1
) -> bytes:
    """The body that SDK 0.38 sends."""
    asked = ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)  # type: ignore[arg-type]
    return forward_backward_request_to_proto(ForwardBackwardRequest(asked, RUN, seq_id)).SerializeToString()


def decoded(body: bytes) -> TrainingBatch:
    """Return the batch that the service reads from a protobuf body."""
    message = training_codec.parse_proto(body)
    return training_codec.check_batch(training_codec.raw_from_proto(message, FACTS, LIMITS), FACTS, LIMITS)


def decoded_json(body: bytes) -> TrainingBatch:
    """Return the batch that the service reads from an old SDK's JSON body."""
    asked = parse_json(ForwardRequest, body)
    given = asked.forward_backward_input or asked.forward_input
    assert given is not None
    return training_codec.check_batch(training_codec.raw_from_json(given, FACTS, LIMITS), FACTS, LIMITS)


def assert_equal_batches(one: TrainingBatch, other: TrainingBatch) -> None:
    """Same loss, same arrays of the same dtypes."""
    assert one.loss == other.loss
    assert len(one.data) == len(other.data)
    for left, right in zip(one.data, other.data, strict=True):
        assert left.inputs.keys() == right.inputs.keys()
        pairs = [(left.tokens, right.tokens), (left.targets, right.targets)]
        pairs += [(left.inputs[name], right.inputs[name]) for name in left.inputs]
        for mine, yours in pairs:
            assert mine.dtype == yours.dtype
            np.testing.assert_array_equal(mine, yours)
