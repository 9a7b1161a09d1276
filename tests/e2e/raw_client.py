"""The wire by hand: what no SDK would send, and the order in which it would not send it."""

import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from api.wire import weft_wire_pb2 as pb

PROTOBUF = "application/x-protobuf"
RESULT_SECONDS = 150.0


@dataclass
class RawClient:
    """One key's view of a service. Every method returns the raw answer or its JSON."""

    base_url: str
    key: str
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=f"{self.base_url}/api/v1", timeout=60, headers={"X-API-Key": self.key})

    def post(self, endpoint: str, /, **body: Any) -> httpx.Response:
        """POST JSON."""
        return self.http.post(endpoint, json=body)

    def session(self) -> str:
        """A new session."""
        found: str = self.post("/create_session", sdk_version="raw").json()["session_id"]
        return found

    def model(self, base_model: str, session: str | None = None, number: int = 0, **lora: Any) -> str:
        """A new model, made."""
        answer = self.post(
            "/create_model",
            session_id=session or self.session(),
            model_seq_id=number,
            base_model=base_model,
            lora_config={"rank": 4, "seed": 1, **lora},
        )
        assert answer.status_code == 200, answer.text
        made: str = self.result(answer)["model_id"]
        return made

    def result(self, promise: httpx.Response, *, accept: str = "application/json") -> dict[str, Any]:
        """The JSON result of a promise, waited for."""
        found: dict[str, Any] = self.wait(promise.json()["request_id"], accept=accept).json()
        return found

    def points(self, model: str) -> list[dict[str, Any]]:
        """The points of the run's curve."""
        answer = self.http.get(f"{self.base_url}/api/weft/v1/runs/{model}/points")
        found: list[dict[str, Any]] = answer.raise_for_status().json()["points"]
        return found

    def wait(
        self, request_id: str, *, accept: str = "application/json", seconds: float = RESULT_SECONDS
    ) -> httpx.Response:
        """Poll until the future is final."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            answer = self.http.post("/retrieve_future", json={"request_id": request_id}, headers={"Accept": accept})
            if answer.status_code != 408:
                return answer
        raise AssertionError(f"no result within {seconds} s")

    def passes(self, message: pb.ForwardBackwardRequest) -> httpx.Response:
        """POST a protobuf pass."""
        return self.passes_raw(message.SerializeToString())

    def passes_raw(self, body: bytes, **headers: str) -> httpx.Response:
        """POST bytes as a protobuf pass."""
        return self.http.post("/forward_backward", content=body, headers={"Content-Type": PROTOBUF, **headers})

    def step(self, model: str, seq_id: int, **adam: float) -> httpx.Response:
        """POST an optimizer step."""
        return self.post("/optim_step", model_id=model, seq_id=seq_id, adam_params=adam)

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


def pass_message(
    model: str,
    seq_id: int,
    tokens: list[int],
    *,
    targets: list[int] | None = None,
    weights: list[float] | None = None,
    loss: str = "cross_entropy",
    **inputs: list[float],
) -> pb.ForwardBackwardRequest:
    """A one-sequence pass."""
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn=loss)
    wanted = targets if targets is not None else tokens
    if loss == "cross_entropy":
        inputs = {**inputs, "weights": weights if weights is not None else [1.0] * len(wanted)}
    _add_datum(message, tokens, wanted, inputs)
    return message


def lesson_message(model: str, seq_id: int, lines: list[tuple[list[int], list[float]]]) -> pb.ForwardBackwardRequest:
    """A pass that teaches whole lines of tokens, each with the weights of its targets."""
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    for line, weights in lines:
        _add_datum(message, line[:-1], line[1:], {"weights": weights})
    return message


def _add_datum(
    message: pb.ForwardBackwardRequest, tokens: list[int], targets: list[int], inputs: dict[str, list[float]]
) -> None:
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, dtype="<i4").tobytes()
    wanted = np.array(targets, dtype="<i8")
    datum.loss_fn_inputs["target_tokens"].CopyFrom(
        pb.Tensor(dense=wanted.tobytes(), dtype=pb.DTYPE_INT64, shape=[len(wanted)])
    )
    for name, values in inputs.items():
        array = np.array(values, dtype="<f4")
        datum.loss_fn_inputs[name].CopyFrom(
            pb.Tensor(dense=array.tobytes(), dtype=pb.DTYPE_FLOAT32, shape=[len(array)])
        )
