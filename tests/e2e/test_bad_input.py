"""Bad input gets a clear error that names the field and the limit, costs nothing, and leaves the run intact."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zstandard

from api.wire import weft_wire_pb2 as pb
from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.raw_client import RawClient, pass_message

TOKENS = [72, 101, 108, 108, 111]
CONTEXT, VOCABULARY = 2048, 320


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[RawClient]:
    """The first tenant."""
    raw = RawClient(service.base_url, service.key)
    yield raw
    raw.close()


@pytest.fixture(scope="module")
def model(client: RawClient) -> str:
    """A model that every bad request is aimed at."""
    return client.model(BASE_NAME)


@pytest.fixture(scope="module")
def seq_ids() -> Iterator[int]:
    """The model's next seq_ids."""
    return iter(range(1, 10_000))


def image(message: pb.ForwardBackwardRequest) -> None:
    """An image chunk."""
    message.data[0].model_input.add().image.format = "png"


def audio(message: pb.ForwardBackwardRequest) -> None:
    """An audio chunk."""
    message.data[0].model_input.add().dmel.dmel = b"x"


def no_data(message: pb.ForwardBackwardRequest) -> None:
    """Nothing to compute."""
    del message.data[:]


def no_tokens(message: pb.ForwardBackwardRequest) -> None:
    """An empty sequence."""
    del message.data[0].model_input[:]


def unknown_config(message: pb.ForwardBackwardRequest) -> None:
    """A setting that cross_entropy does not know."""
    message.loss_fn_config["temperature"] = 1.0


def bad_csr(message: pb.ForwardBackwardRequest) -> None:
    """A sparse tensor whose columns lie outside."""
    indices = np.array([0, 1], dtype="<i8").tobytes()
    csr = pb.SparseCsr(
        values=np.ones(1, "<f4").tobytes(), crow_indices=indices, col_indices=np.array([9], "<i8").tobytes()
    )
    message.data[0].loss_fn_inputs["weights"].CopyFrom(pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_FLOAT32, shape=[1, 2]))


BAD_PASSES: dict[str, tuple[dict[str, Any], Callable[[pb.ForwardBackwardRequest], None] | None, list[str]]] = {
    "unknown loss": ({"loss": "nonesuch"}, None, ["nonesuch", "cross_entropy"]),
    "unknown config key": ({}, unknown_config, ["temperature", "loss_fn_config"]),
    "lengths differ": ({"targets": [1, 2]}, None, ["target_tokens", "5"]),
    "weights differ": ({"weights": [1.0]}, None, ["weights"]),
    "token outside": ({"tokens": [*TOKENS[:4], VOCABULARY]}, None, ["vocabulary", str(VOCABULARY - 1)]),
    "target outside": ({"targets": [-1] * 5}, None, ["target_tokens", "vocabulary"]),
    "NaN weight": ({"weights": [float("nan")] * 5}, None, ["weights", "NaN"]),
    "infinite advantage": (
        {"loss": "ppo", "logprobs": [0.0] * 5, "advantages": [float("inf")] * 5},
        None,
        ["advantages", "infinite"],
    ),
    "missing input": ({"loss": "ppo", "advantages": [0.0] * 5}, None, ["logprobs"]),
    "empty data": ({}, no_data, ["data", "empty"]),
    "empty sequence": ({}, no_tokens, ["model_input", "empty"]),
    "too long": ({"tokens": [1] * (CONTEXT + 1)}, None, [str(CONTEXT), str(CONTEXT + 1)]),
    "image": ({}, image, ["text"]),
    "audio": ({}, audio, ["text"]),
    "bad sparse tensor": ({}, bad_csr, ["weights"]),
}


@pytest.mark.parametrize("case", list(BAD_PASSES))
def test_bad_pass_fails_clearly_and_the_run_goes_on(
    client: RawClient, model: str, seq_ids: Iterator[int], case: str
) -> None:
    arguments, spoil, words = BAD_PASSES[case]
    given = {"tokens": TOKENS, **arguments}
    message = pass_message(model, next(seq_ids), **given)
    if spoil is not None:
        spoil(message)
    failed = client.result(client.passes(message))
    assert failed["category"] == "user"
    for word in words:
        assert word in failed["error"]
    good = client.result(client.passes(pass_message(model, next(seq_ids), TOKENS)))
    assert good["metrics"]["loss:sum"] > 0


@pytest.mark.parametrize(
    ("adam", "word"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"beta1": 1.0}, "beta1"),
        ({"eps": -1.0}, "eps"),
    ],
)
def test_bad_optimizer_settings_fail_clearly(
    client: RawClient, model: str, seq_ids: Iterator[int], adam: dict[str, float], word: str
) -> None:
    failed = client.result(client.step(model, next(seq_ids), **adam))
    assert failed["category"] == "user"
    assert word in failed["error"]


def test_garbage_protobuf_is_400(client: RawClient) -> None:
    answer = client.passes_raw(b"\xff\xff\xff nonsense")
    assert answer.status_code == 400
    assert "protobuf" in answer.json()["detail"]


def test_zstd_body_is_taken(client: RawClient, model: str, seq_ids: Iterator[int]) -> None:
    body = zstandard.ZstdCompressor().compress(pass_message(model, next(seq_ids), TOKENS).SerializeToString())
    answer = client.passes_raw(body, **{"Content-Encoding": "zstd"})
    assert client.result(answer)["metrics"]["loss:sum"] > 0


def test_zstd_bomb_is_refused_and_uses_its_seq_id_up(client: RawClient, model: str, seq_ids: Iterator[int]) -> None:
    message = pass_message(model, next(seq_ids), TOKENS)
    bomb = message.SerializeToString() + b"\x1a\x80\x80\x80\x80\x08" + bytes(200 * 2**20)
    answer = client.passes_raw(zstandard.ZstdCompressor().compress(bomb), **{"Content-Encoding": "zstd"})
    failed = client.result(answer)
    assert "limit" in failed["error"]
    assert client.result(client.passes(pass_message(model, next(seq_ids), TOKENS)))["metrics"]["loss:sum"] > 0


def test_damaged_zstd_is_400(client: RawClient) -> None:
    for body in (b"not zstd", zstandard.ZstdCompressor().compress(bytes(1000))[:-3]):
        answer = client.passes_raw(body, **{"Content-Encoding": "zstd"})
        assert answer.status_code == 400


def test_body_over_the_limit_is_413(client: RawClient) -> None:
    answer = client.http.post("/create_session", content=b'{"tags": ["' + bytes(65 * 2**20))
    assert answer.status_code == 413


@pytest.mark.parametrize("rank", [0, -1, 129])
def test_rank_out_of_range_is_400(client: RawClient, rank: int) -> None:
    answer = client.post(
        "/create_model",
        session_id=client.session(),
        model_seq_id=0,
        base_model=BASE_NAME,
        lora_config={"rank": rank},
    )
    assert answer.status_code == 400
    assert "rank must be 1 to 128" in answer.json()["detail"]


def test_unknown_base_model_is_400_and_never_another_one(client: RawClient) -> None:
    session = client.session()
    answer = client.post("/create_model", session_id=session, model_seq_id=0, base_model="meta/other")
    assert (answer.status_code, answer.json()["code"]) == (400, "unknown_base_model")
    assert BASE_NAME in answer.json()["detail"]
    answer = client.post(
        "/create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="meta/other"
    )
    assert answer.json()["code"] == "unknown_base_model"


@pytest.mark.parametrize("name", ["../x", "a/b", "", "..", "tinker://other:train:0/weights/x", "x" * 300])
def test_bad_checkpoint_name_fails_clearly(client: RawClient, model: str, seq_ids: Iterator[int], name: str) -> None:
    failed = client.result(client.post("/save_weights", model_id=model, seq_id=next(seq_ids), path=name))
    assert failed["category"] == "user"
    assert "path" in failed["error"]


@pytest.mark.parametrize(
    "path",
    [
        "tinker://{model}/sampler_weights/x",
        "tinker://{model}/weights/../x",
        "tinker://{model}/weights/..",
        "tinker://{model}/elsewhere/x",
        "/etc/passwd",
        "",
    ],
)
def test_bad_load_path_fails_clearly(client: RawClient, model: str, seq_ids: Iterator[int], path: str) -> None:
    given = path.format(model=model)
    answer = client.post("/load_weights", model_id=model, seq_id=next(seq_ids), path=given, optimizer=True)
    assert client.result(answer)["category"] == "user"
    made = client.post("/load_weights", session_id=client.session(), model_seq_id=0, path=given, optimizer=True)
    assert made.status_code == 400


@pytest.fixture(scope="module")
def sampler(client: RawClient) -> str:
    """A sampler of the base."""
    answer = client.post(
        "/create_sampling_session", session_id=client.session(), sampling_session_seq_id=0, base_model=BASE_NAME
    )
    found: str = answer.json()["sampling_session_id"]
    return found


class TestSampling:
    """Bad samples are refused at once: nothing waits behind them."""

    @pytest.mark.parametrize(
        ("body", "params", "word"),
        [
            ({"num_samples": 0}, {}, "num_samples"),
            ({}, {"max_tokens": 0}, "max_tokens"),
            ({}, {"max_tokens": CONTEXT}, str(CONTEXT)),
            ({}, {"temperature": -1.0}, "temperature"),
            ({}, {"top_p": 0.0}, "top_p"),
            ({}, {"top_p": 1.5}, "top_p"),
            ({}, {"top_k": -2}, "top_k"),
            ({}, {"stop": [""]}, "stop"),
            ({}, {"stop": [VOCABULARY]}, "stop"),
            ({"prompt": {"chunks": []}}, {}, "prompt"),
            ({"prompt": {"chunks": [{"tokens": [VOCABULARY]}]}}, {}, "vocabulary"),
            ({"prompt": {"chunks": [{"data": "eA==", "format": "png", "type": "image"}]}}, {}, "text"),
            ({"prompt_logprobs_last_n": 2}, {}, "prompt_logprobs_last_n"),
            ({"prompt_logprobs": True, "prompt_logprobs_last_n": 5}, {}, "prompt_logprobs_last_n"),
            ({"topk_sample_logprobs": 1000}, {}, "topk_sample_logprobs"),
            ({"prompt_alt_tokens_k": 1000}, {}, "prompt_alt_tokens_k"),
        ],
    )
    def test_bad_sample_is_400(
        self, client: RawClient, sampler: str, body: dict[str, Any], params: dict[str, Any], word: str
    ) -> None:
        asked = {
            "sampling_session_id": sampler,
            "seq_id": 1,
            "num_samples": 1,
            "prompt": {"chunks": [{"tokens": TOKENS}]},
            "sampling_params": {"max_tokens": 2, **params},
        }
        answer = client.post("/asample", **{**asked, **body})
        assert answer.status_code == 400, answer.text
        assert word in answer.json()["detail"]

    def test_every_answer_counts_its_sequences(self, client: RawClient, sampler: str) -> None:
        answer = client.post(
            "/asample",
            sampling_session_id=sampler,
            seq_id=1_000_000_000 * 10**9,
            num_samples=3,
            prompt={"chunks": [{"tokens": TOKENS}]},
            sampling_params={"max_tokens": 2},
        )
        assert len(answer.json()["sample_sequence_ids"]) == 3
        assert len(client.result(answer)["sequences"]) == 3


def test_foreign_ids_are_404_without_side_effect(client: RawClient, service: Service, model: str) -> None:
    stranger = RawClient(service.base_url, service.other_key)
    session = client.session()
    future = client.step(client.model(BASE_NAME), 1).json()["request_id"]
    answers = [
        stranger.step(model, 9_999),
        stranger.passes(pass_message(model, 9_998, TOKENS)),
        stranger.post("/get_info", model_id=model),
        stranger.post("/unload_model", model_id=model),
        stranger.post("/save_weights", model_id=model, seq_id=9_997, path="mine"),
        stranger.post("/create_model", session_id=session, model_seq_id=0, base_model=BASE_NAME),
        stranger.post("/create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=BASE_NAME),
        stranger.post("/retrieve_future", request_id=future),
        stranger.post("/weights_info", tinker_path=f"tinker://{model}/weights/x"),
        stranger.http.get(f"/training_runs/{model}"),
    ]
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert "error" not in client.wait(future).json()
    assert client.post("/get_info", model_id=model).status_code == 200
    stranger.close()


@pytest.mark.parametrize("key", ["", "tml-wrong", "nonsense"])
def test_wrong_key_is_401(service: Service, key: str) -> None:
    stranger = RawClient(service.base_url, key)
    answer = stranger.post("/client/config", sdk_version="0.38.0")
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    stranger.close()
