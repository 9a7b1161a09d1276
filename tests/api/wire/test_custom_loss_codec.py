"""Custom losses on the wire, as SDK 0.38 sends them."""

import re
from typing import Any

import numpy as np
import pytest
from tinker import types

from contracts.custom_loss import loss_id_of
from contracts.errors import InvalidRequest
from contracts.losses import LossName
from tests.api.wire.support import datum, decoded, sdk_body
from tests.custom_losses import LOGP, call, nodes


def custom_loss_id() -> str:
    """The id of a loss with an input of each rank."""
    inputs = [
        {"name": name, "rank": rank} for name, rank in (("logprobs", 1), ("old", 1), ("sign", 0), ("target_tokens", 1))
    ]
    graph = nodes(call("loss", "torch.sum", LOGP))
    more = [
        {"op": "placeholder", "name": one["name"], "target": one["name"], "args": [], "kwargs": {}}
        for one in inputs[1:]
    ]
    graph["nodes"][1:1] = more
    return loss_id_of("mine", inputs, graph)


def test_a_custom_loss_has_the_inputs_that_it_reads() -> None:
    """The inputs keep their shapes; a scalar comes as a vector of one, and what the loss does not read may come along."""
    given = {
        "old": types.TensorData(data=[0.5, 1.5, 2.5], dtype="float32", shape=[3]),
        "sign": types.TensorData(data=[-1.0], dtype="float32", shape=[]),
        "advantages": types.TensorData(data=[1.0, 2.0], dtype="float32", shape=[2]),
    }
    batch = decoded(sdk_body([datum([5, 6, 7], **given)], "custom", {"loss_id": custom_loss_id()}))
    assert batch.loss.name is LossName.CUSTOM
    assert {name: values.shape for name, values in batch.data[0].inputs.items()} == {"old": (3,), "sign": ()}


@pytest.mark.parametrize(
    ("config", "inputs", "told"),
    [
        (None, {}, "loss_fn_config must be"),
        ({"loss_id": "another"}, {}, "no id of a custom loss"),
        ({"loss_id": 7.0}, {}, "loss_fn_config must be"),
        ({}, {"sign": [1.0]}, "reads old; send it"),
        ({}, {"old": [[1.0], [1.0], [1.0]], "sign": [1.0]}, "old has rank 2"),
    ],
)
def test_a_custom_loss_without_its_id_or_inputs_is_refused(
    config: dict[str, Any] | None, inputs: dict[str, Any], told: str
) -> None:
    tensors = {name: types.TensorData.from_numpy(np.array(values, np.float32)) for name, values in inputs.items()}
    given = {"loss_id": custom_loss_id()} if config == {} else config
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        decoded(sdk_body([datum([5, 6, 7], **tensors)], "custom", given))
