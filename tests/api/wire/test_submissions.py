"""Answers of the endpoints to the codecs' verdicts, over real HTTP; no worker runs the operations here."""

from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from sqlalchemy import func, select, update

from api.wire import weft_wire_pb2 as pb
from contracts.codec import pack
from contracts.operations import OptimStep
from contracts.paths import Segment
from store.tables import Checkpoint, Operation, OperationPayload, Session
from tenants.runs import get_run
from tests.api.conftest import BASE, Service, Tenant
from tests.ledger_heads import ready_heads

PROTOBUF = "application/x-protobuf"


def pass_body(run: str, seq_id: int, *, forward_only: bool = False, tokens: int = 3) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=run, seq_id=seq_id, loss_fn="cross_entropy", forward_only=forward_only)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.ones(tokens, "<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(
        pb.Tensor(dense=np.ones(tokens, "<i8").tobytes(), dtype=pb.DTYPE_INT64)
    )
    return message.SerializeToString()


async def send_pass(tenant: Tenant, body: bytes, **headers: str) -> httpx.Response:
    return await tenant.http.post("/forward_backward", content=body, headers={"Content-Type": PROTOBUF, **headers})


async def failure(tenant: Tenant, promise: httpx.Response) -> dict[str, Any]:
    """The failed future behind a promise."""
    assert promise.status_code == 200, promise.text
    answer = await tenant.http.post("/retrieve_future", json={"request_id": promise.json()["request_id"]})
    failed: dict[str, Any] = answer.json()
    assert failed["category"] == "user"
    return failed


async def next_seq_id(tenant: Tenant, run: str) -> int:
    """The seq_id that the run waits for."""
    async with tenant.service.database.read() as session:
        return (await get_run(session, tenant.id, run)).next_seq_id


async def operations(service: Service) -> int:
    async with service.database.read() as session:
        return await session.scalar(select(func.count()).select_from(Operation)) or 0


class TestPasses:
    async def test_a_repeat_is_the_same_request_and_another_body_a_conflict(self, cats: Tenant) -> None:
        run = await cats.run()
        first = await send_pass(cats, pass_body(run, 1))
        assert (await send_pass(cats, pass_body(run, 1))).json() == first.json()
        packed = zstandard.ZstdCompressor().compress(pass_body(run, 1))
        assert (await send_pass(cats, packed, **{"Content-Encoding": "zstd"})).json() == first.json()
        other = await send_pass(cats, pass_body(run, 1, tokens=4))
        assert (other.status_code, other.json()["code"]) == (400, "sequence_conflict")

    async def test_forward_is_no_repeat_of_forward_backward(self, cats: Tenant) -> None:
        """Both carry the same payload, and only one of them leaves gradients."""
        run = await cats.run()
        assert (await send_pass(cats, pass_body(run, 1, forward_only=True))).status_code == 200
        answer = await send_pass(cats, pass_body(run, 1))
        assert (answer.status_code, answer.json()["code"]) == (400, "sequence_conflict")

    @pytest.mark.parametrize("encoding", ["identity", "zstd"])
    async def test_a_body_over_the_limit_uses_its_seq_id_up(self, cats: Tenant, encoding: str) -> None:
        run = await cats.run()
        body = pass_body(run, 1, tokens=100_000)
        if encoding == "zstd":
            body = zstandard.ZstdCompressor().compress(body)
        promise = await send_pass(cats, body, **{"Content-Encoding": encoding})
        assert "limit of 100000 bytes" in (await failure(cats, promise))["error"]
        again = await send_pass(cats, body, **{"Content-Encoding": encoding})
        assert again.json() == promise.json()
        await send_pass(cats, pass_body(run, 2))
        async with cats.service.database.read() as session:
            ready = await ready_heads(cats.service.ledger, session, BASE)
        assert [one.seq_id for one in ready] == [2]

    async def test_a_body_over_the_limit_that_names_no_run_is_413(self, cats: Tenant, service: Service) -> None:
        answer = await send_pass(cats, bytes(200_000))
        assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")
        assert await operations(service) == 0

    async def test_a_body_over_the_limit_for_a_foreign_run_is_404(
        self, cats: Tenant, dogs: Tenant, service: Service
    ) -> None:
        answer = await send_pass(dogs, pass_body(await cats.run(), 1, tokens=100_000))
        assert answer.status_code == 404
        assert await operations(service) == 0

    @pytest.mark.parametrize("seq_id", [-1, 2**31, "one", None])
    async def test_an_impossible_seq_id_is_400_and_leaves_nothing(
        self, cats: Tenant, service: Service, seq_id: object
    ) -> None:
        answer = await cats.http.post("/optim_step", json={"model_id": await cats.run(), "seq_id": seq_id})
        assert answer.status_code == 400
        assert "seq_id" in answer.json()["detail"]
        assert await operations(service) == 0


class TestOptimStep:
    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"adam_params": None},
            {"adam_params": {}},
            {"adam_params": {"beta1": None}},
            {"adam_params": {"eps": 1e-12}},
        ],
    )
    async def test_what_is_left_out_is_the_default(self, cats: Tenant, service: Service, body: dict[str, Any]) -> None:
        answer = await cats.http.post("/optim_step", json={"model_id": await cats.run(), "seq_id": 1, **body})
        assert answer.status_code == 200
        async with service.database.read() as session:
            stored = await session.scalar(select(OperationPayload.body))
        assert stored == pack(OptimStep())

    @pytest.mark.parametrize(
        ("body", "word"),
        [
            ('"adam_params": {"learning_rate": NaN}', "learning_rate must be a finite"),
            ('"adam_params": {"grad_clip_norm": Infinity}', "grad_clip_norm must be a finite"),
            ('"adam_params": {"learning_rate": "fast"}', "learning_rate"),
            ('"adam_params": {"beta2": 1.0}', "beta2"),
            ('"adam_params": {"beta1": -0.1}', "beta1"),
            ('"adam_params": {"eps": -1e-9}', "eps"),
            ('"optimizer_params": {"type": "lion", "learning_rate": 0.1}', "'lion'"),
            ('"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}', "created for adamw"),
            ('"optimizer_params": {"type": "dimuon", "momentum": 0.1}', "momentum is no setting of dimuon"),
            ('"optimizer_params": {"type": "dimuon", "damping": 0.1}', "damping is not applied"),
        ],
    )
    async def test_bad_settings_use_their_seq_id_up(self, cats: Tenant, body: str, word: str) -> None:
        content = f'{{"model_id": "{await cats.run()}", "seq_id": 1, {body}}}'
        assert word in (await failure(cats, await cats.http.post("/optim_step", content=content)))["error"]

    async def test_defaults_of_the_hosted_dimuon_are_taken(self, cats: Tenant) -> None:
        """SDKs 0.29.1 and 0.30.0 send them with every step. Such a step is refused for the run's optimizer alone."""
        hosted = '"learning_rate": 0.1, "beta1": 0.9, "damping": 0.0001, "rank_lr_correction_exponent": 0.175'
        body = f'"optimizer_params": {{"type": "dimuon", "grad_clip_norm": 0.0, {hosted}}}'
        content = f'{{"model_id": "{await cats.run()}", "seq_id": 1, {body}}}'
        assert (
            "created for adamw" in (await failure(cats, await cats.http.post("/optim_step", content=content)))["error"]
        )


class TestSavesAndLoads:
    async def test_a_nameless_save_repeated_with_a_new_sampler_counter_is_the_same_request(self, cats: Tenant) -> None:
        body = {"model_id": await cats.run(), "seq_id": 1, "kind": "snapshot"}
        answers = [
            await cats.http.post("/save_weights_for_sampler", json={**body, "sampling_session_seq_id": counter})
            for counter in (0, 1)
        ]
        assert answers[0].json() == answers[1].json()
        other = await cats.http.post("/save_weights_for_sampler", json={**body, "path": "named"})
        assert other.json()["code"] == "sequence_conflict"

    @pytest.mark.parametrize(
        ("endpoint", "body", "word"),
        [
            ("/save_weights", {}, "path is missing"),
            ("/save_weights", {"path": "a/b"}, "path"),
            ("/save_weights", {"path": "a", "ttl_seconds": 0}, "ttl_seconds"),
            ("/save_weights_for_sampler", {}, "path"),
            ("/save_weights_for_sampler", {"path": "a", "kind": "molten"}, "kind"),
            ("/save_weights_external", {}, "path"),
            ("/save_weights_external", {"path": "a/b"}, "path"),
            (
                "/save_weights_external",
                {"path": "a", "age_encryption_recipients": ["age1"]},
                "age_encryption_recipients",
            ),
            ("/load_weights", {"path": None}, "path"),
            ("/load_weights", {"path": 7}, "path"),
            ("/load_weights", {"path": "tinker://s:train:0/weights/a", "optimizer": "perhaps"}, "optimizer"),
            ("/load_weights", {"path": "tinker://s:train:0/sampler_weights/a"}, "weights path"),
        ],
    )
    async def test_a_bad_one_uses_its_seq_id_up(
        self, cats: Tenant, endpoint: str, body: dict[str, Any], word: str
    ) -> None:
        run = await cats.run()
        promise = await cats.http.post(endpoint, json={"model_id": run, "seq_id": 1, **body})
        assert word in (await failure(cats, promise))["error"]
        assert await next_seq_id(cats, run) == 2

    @pytest.mark.parametrize(
        "endpoint", ["save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights"]
    )
    async def test_one_over_the_limit_uses_its_seq_id_up(self, cats: Tenant, dogs: Tenant, endpoint: str) -> None:
        mine, theirs = await cats.run(), await dogs.run()
        metadata = {"seq_id": "7", "model_id": theirs, "note": "x" * 100_000}
        body = {"model_id": mine, "path": 'a"b', "seq_id": 1, "user_metadata": metadata}
        failed = await failure(cats, await cats.http.post(f"/{endpoint}", json=body))
        assert "over the limit" in failed["error"]
        assert (await next_seq_id(cats, mine), await next_seq_id(dogs, theirs)) == (2, 1)
        nameless = await cats.http.post(f"/{endpoint}", json={"user_metadata": metadata, "model_id": mine, "seq_id": 2})
        assert nameless.status_code == 413

    async def test_a_run_made_by_a_load_is_found_again_when_the_checkpoint_is_gone(self, cats: Tenant) -> None:
        source = await cats.run()
        await cats.checkpoint(source, "start")
        body = {
            "session_id": await cats.session(),
            "model_seq_id": 0,
            "path": f"tinker://{source}/weights/start",
            "optimizer": True,
        }
        made = await cats.http.post("/load_weights", json=body)
        assert made.json()["model_id"] == f"{body['session_id']}:train:0"
        deleted = await cats.http.delete(f"/training_runs/{source}/checkpoints/weights/start")
        assert deleted.is_success
        assert (await cats.http.post("/load_weights", json=body)).json() == made.json()
        assert (await cats.http.post("/load_weights", json={**body, "model_seq_id": 1})).status_code == 404
        conflict = await cats.http.post("/load_weights", json={**body, "optimizer": False})
        assert conflict.json()["code"] == "sequence_conflict"

    async def test_a_loaded_run_inherits_the_settings_of_the_checkpoint(self, cats: Tenant) -> None:
        source = await cats.run()
        await cats.checkpoint(source, "start")
        path = f"tinker://{source}/weights/start"
        body = {"session_id": await cats.session(), "model_seq_id": 0, "path": path, "optimizer": False}
        other = await cats.http.post("/load_weights", json={**body, "base_model": "test/other"})
        assert other.status_code == 400
        assert "base_model" in other.json()["detail"]
        made = (await cats.http.post("/load_weights", json={**body, "base_model": BASE})).json()["model_id"]
        info = (await cats.http.post("/get_info", json={"model_id": made})).json()
        assert (info["lora_rank"], info["is_lora"], info["model_data"]["model_name"]) == (8, True, BASE)
        weights = (await cats.http.post("/weights_info", json={"tinker_path": path})).json()
        assert (weights["base_model"], weights["lora_rank"], weights["train_mlp"]) == (BASE, 8, True)


class TestModels:
    @pytest.mark.parametrize(
        ("lora", "word"),
        [
            ({"rank": 0}, "rank must be 1 to 128"),
            ({"rank": 129}, "rank must be 1 to 128"),
            ({"seed": 2**63}, "seed"),
            ({"train_attn": False, "train_mlp": False, "train_unembed": False}, "train_attn"),
        ],
    )
    async def test_bad_settings_are_400_and_leave_nothing(
        self, cats: Tenant, service: Service, lora: dict[str, Any], word: str
    ) -> None:
        body = {"session_id": await cats.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
        answer = await cats.http.post("/create_model", json=body)
        assert answer.status_code == 400
        assert word in answer.json()["detail"]
        assert await operations(service) == 0

    async def test_a_repeat_is_the_same_run_even_after_its_session_has_ended(self, cats: Tenant) -> None:
        nulls = {"lora_config": {"rank": None, "seed": None, "train_attn": None}, "user_metadata": None}
        body = {"session_id": await cats.session(), "model_seq_id": 0, "base_model": BASE, **nulls}
        made = await cats.http.post("/create_model", json=body)
        assert made.json()["model_id"] == f"{body['session_id']}:train:0"
        info = await cats.http.post("/get_info", json={"model_id": made.json()["model_id"]})
        assert (info.json()["lora_rank"], info.json()["optimizer_config"]) == (32, {"type": "adamw"})
        await end_session(cats, body["session_id"])
        assert (await cats.http.post("/create_model", json=body)).json() == made.json()
        late = await cats.http.post("/create_model", json={**body, "model_seq_id": 1})
        assert (late.status_code, late.json()["code"]) == (400, "session_ended")

    async def test_an_optimizer_that_is_not_there_is_400(self, cats: Tenant) -> None:
        body = {"session_id": await cats.session(), "model_seq_id": 0, "base_model": BASE}
        answer = await cats.http.post("/create_model", json={**body, "optimizer_config": {"type": "lion"}})
        assert answer.status_code == 400
        assert "'lion'" in answer.json()["detail"]


async def end_session(tenant: Tenant, session_id: str) -> None:
    async with tenant.service.database.write() as transaction:
        ended = update(Session).where(Session.id == session_id)
        await transaction.execute(ended.values(ended_at=tenant.service.clock(), end_reason="finished"))


async def delete_checkpoint(tenant: Tenant, name: str) -> None:
    async with tenant.service.database.write() as transaction:
        gone = update(Checkpoint).where(Checkpoint.name == name)
        await transaction.execute(gone.values(expires_at=tenant.service.clock()))


class TestSamples:
    @pytest.fixture
    def asked(self) -> Callable[[str, int], dict[str, Any]]:
        def body(sampler: str, seq_id: int) -> dict[str, Any]:
            return {
                "sampling_session_id": sampler,
                "seq_id": seq_id,
                "num_samples": 2,
                "prompt": {"chunks": [{"tokens": [1]}]},
            }

        return body

    async def sampler(self, tenant: Tenant) -> tuple[str, str]:
        """A sampler of a checkpoint, and its session."""
        run = await tenant.run()
        await tenant.checkpoint(run, "cat", segment=Segment.SAMPLER_WEIGHTS)
        session = await tenant.session()
        body = {
            "session_id": session,
            "sampling_session_seq_id": 0,
            "model_path": f"tinker://{run}/sampler_weights/cat",
        }
        answer = await tenant.http.post("/create_sampling_session", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["sampling_session_id"], session

    @pytest.mark.parametrize(("ends", "status"), [("session", 400), ("checkpoint", 404)])
    async def test_a_repeat_is_found_when_new_samples_are_refused(
        self, cats: Tenant, asked: Callable[[str, int], dict[str, Any]], ends: str, status: int
    ) -> None:
        sampler, session = await self.sampler(cats)
        first = await cats.http.post("/asample", json=asked(sampler, 0))
        request_id = first.json()["request_id"]
        assert first.json()["sample_sequence_ids"] == [f"{request_id}:0", f"{request_id}:1"]
        if ends == "session":
            await end_session(cats, session)
        else:
            await delete_checkpoint(cats, "cat")
        assert (await cats.http.post("/asample", json=asked(sampler, 0))).json() == first.json()
        assert (await cats.http.post("/asample", json=asked(sampler, 1))).status_code == status
        other = {**asked(sampler, 0), "num_samples": 1}
        assert (await cats.http.post("/asample", json=other)).json()["code"] == "sequence_conflict"

    async def test_a_clones_counter_is_taken(self, cats: Tenant, asked: Callable[[str, int], dict[str, Any]]) -> None:
        sampler, _ = await self.sampler(cats)
        assert (await cats.http.post("/asample", json=asked(sampler, 10**18))).status_code == 200
        assert (await cats.http.post("/asample", json=asked(sampler, 2**70))).status_code == 400

    async def test_what_is_sampled_must_be_sampler_weights_of_a_served_base(self, cats: Tenant) -> None:
        run = await cats.run()
        await cats.checkpoint(run, "cat")
        body = {"session_id": await cats.session(), "sampling_session_seq_id": 0}
        for wrong in (
            {"model_path": f"tinker://{run}/weights/cat"},
            {"base_model": "test/other"},
            {},
            {"model_path": "tinker://../sampler_weights/cat/.."},
        ):
            assert (await cats.http.post("/create_sampling_session", json={**body, **wrong})).status_code == 400
        plain = await cats.http.post("/create_sampling_session", json={**body, "base_model": BASE})
        described = await cats.http.get(f"/samplers/{plain.json()['sampling_session_id']}")
        assert described.json()["base_model"] == BASE
