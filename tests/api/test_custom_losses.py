"""Creation of custom losses: an id that is the loss, refusals by name, and nothing of another tenant's session."""

import json
import threading

import pytest
from tinker.types.create_custom_loss_response import CreateCustomLossResponse

from api.request_body import OFF_LOOP_BYTES
from api.wire import training_codec
from api.wire import weft_wire_pb2 as pb
from contracts.custom_loss import MAX_NODES, loss_id_of, read_custom_loss
from contracts.operations import OperationKind
from tests.custom_losses import INPUTS, LOGP, call, nodes

GRAPH = nodes(call("loss", "torch.sum", LOGP))


async def create(tenant, session: str, graph, inputs=INPUTS):
    body = {"session_id": session, "custom_loss_seq_id": 0, "name": "loss", "inputs": inputs, "graph": graph}
    return await tenant.http.post("/create_custom_loss", json=body)


async def test_a_loss_is_created_once_however_often_it_is_sent(cats) -> None:
    session = await cats.session()
    first, again = [(await create(cats, session, GRAPH)).json() for _ in range(2)]
    assert first == again
    answer = await cats.http.post("/retrieve_future", json={"request_id": first["request_id"]})
    created = CreateCustomLossResponse.model_validate(answer.json())
    assert [node.target for node in read_custom_loss(created.loss_id).nodes] == ["logprobs", "torch.sum", "output"]
    other = (await create(cats, session, nodes(call("loss", "torch.mean", LOGP)))).json()
    assert other["request_id"] != first["request_id"]


async def test_a_session_of_another_tenant_is_not_found(cats, dogs) -> None:
    refused = await create(dogs, await cats.session(), GRAPH)
    assert (refused.status_code, refused.json()["code"]) == (404, "not_found")


async def test_what_is_no_loss_is_refused_by_name(cats) -> None:
    session = await cats.session()
    for graph, inputs, told in (
        (nodes(call("loss", "os.system", "true")), INPUTS, "os.system"),
        (nodes(call("loss", "torch.sum", LOGP)), [{"name": "other", "rank": 1}], "'other' is no name there"),
        (nodes(call("loss", "torch.sum", LOGP)), [], "the first must be logprobs"),
        (nodes(call("loss", "torch.sum", LOGP, *["x" * 90] * 60)), INPUTS, "which custom losses may not"),
        ({"format": 1, "nodes": [1, 2]}, INPUTS, "must be an object"),
    ):
        refused = await create(cats, session, graph, inputs)
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request"), refused.text
        assert told in refused.json()["detail"]


async def test_a_request_id_that_is_no_loss_is_refused(cats) -> None:
    for request_id in ("custom-loss:", "custom-loss:weft-loss-1.AAAA", "custom-loss:../../etc/passwd"):
        refused = await cats.http.post("/retrieve_future", json={"request_id": request_id})
        assert refused.status_code == 400


PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.mark.parametrize("wire", ["protobuf", "JSON", "JSON with escapes"])
async def test_a_small_request_whose_loss_is_large_is_checked_on_a_thread(
    cats, dogs, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    """An id of a few KiB stands for a graph that takes longer to check than a neighbour should wait."""
    on_loop: list[bool] = []

    def noted(loss_id: str):
        on_loop.append(threading.current_thread() is threading.main_thread())
        return read_custom_loss(loss_id)

    monkeypatch.setattr(training_codec, "read_custom_loss", noted)
    calls = [call(f"n{number}", "torch.neg", LOGP) for number in range(MAX_NODES - 2)]
    loss_id = loss_id_of("large", INPUTS, nodes(*calls, result="n0"))
    run, theirs = await cats.run(), await dogs.run()
    if wire == "protobuf":
        message = pb.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="custom")
        message.loss_fn_config_v2["loss_id"].text = loss_id
        body, headers = message.SerializeToString(), PROTOBUF
    else:
        given = {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}, "data": []}
        body = json.dumps({"model_id": run, "seq_id": 1, "forward_backward_input": given}).encode()
        if "escapes" in wire:
            body = body.replace(b"weft-loss", b"\\u0077eft-loss")
        headers = {"content-type": "application/json"}
    assert len(body) < OFF_LOOP_BYTES
    promise = (await cats.http.post("/forward_backward", content=body, headers=headers)).raise_for_status().json()
    told = await cats.http.post("/retrieve_future", json={"request_id": promise["request_id"]})
    assert "data is empty" in told.json()["error"]
    assert on_loop == [False]
    assert await dogs.operation(theirs, kind=OperationKind.OPTIM_STEP)
