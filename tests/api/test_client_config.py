import pytest
from tinker import types
from tinker.types.client_config_response import ClientConfigResponse
from tinker.types.client_dynamic_config_response import ClientDynamicConfigResponse

from store.settings import Settings


async def test_client_config_has_the_flags_of_the_protobuf_path(cats) -> None:
    answer = (await cats.http.post("/client/config", json={"sdk_version": "0.38.0"})).json()
    ClientConfigResponse.model_validate(answer)
    assert answer == {
        "pjwt_auth_enabled": False,
        "use_pyqwest_transport": True,
        "parallel_fwdbwd_chunks": True,
        "proto_write_fwdbwd": True,
        "fwd_via_fwdbwd": True,
        "proto_compress_fwdbwd": True,
        "create_model_via_load_weights": True,
        "sample_join_sampling_session": True,
        "custom_loss_server_side": True,
        "sample_use_retrieve_futures": False,
    }


class TestJointPolls:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"sdk_joint_polls": True})

    async def test_a_setting_turns_joint_polls_on(self, cats) -> None:
        answer = (await cats.http.post("/client/config", json={"sdk_version": "0.38.0"})).json()
        assert ClientConfigResponse.model_validate(answer).sample_use_retrieve_futures


class TestTransport:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"sdk_pyqwest": False})

    async def test_a_setting_has_the_sdk_send_with_httpx(self, cats, dogs) -> None:
        for caller in (cats, dogs):
            answer = (await caller.http.post("/client/config", json={"sdk_version": "0.38.0"})).json()
            assert not ClientConfigResponse.model_validate(answer).use_pyqwest_transport


class TestCustomLosses:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"sdk_custom_losses": False})

    async def test_a_setting_keeps_custom_losses_with_the_sdk(self, cats, dogs) -> None:
        """While processes of a version before, which know none, answer beside."""
        for caller in (cats, dogs):
            answer = (await caller.http.post("/client/config", json={"sdk_version": "0.38.0"})).json()
            assert not ClientConfigResponse.model_validate(answer).custom_loss_server_side


async def test_dynamic_config_turns_the_cancelling_of_samples_on(cats) -> None:
    answer = (await cats.http.post("/client/dynamic_config", json={"sdk_version": "0.38.0"})).json()
    assert ClientDynamicConfigResponse.model_validate(answer).sample_cancel_enabled


async def test_capabilities_list_the_served_bases(cats) -> None:
    answer = (await cats.http.get("/get_server_capabilities")).json()
    (model,) = types.GetServerCapabilitiesResponse.model_validate(answer).supported_models
    assert (model.model_name, model.max_context_length) == ("test/tiny", 128)
    assert (model.trainable, model.sampleable) == (True, True)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"not json", b'{"session_id":"sessionless-1","events":[{"event":"SESSION_START"}]}']
)
async def test_telemetry_takes_anything(cats, body: bytes) -> None:
    response = await cats.http.post("/telemetry", content=body)
    assert (response.status_code, response.json()) == (200, {"status": "accepted"})


async def test_telemetry_over_the_body_limit_is_413(cats, settings) -> None:
    response = await cats.http.post("/telemetry", content=b" " * (settings.max_body_bytes + 1))
    assert (response.status_code, response.json()["code"]) == (413, "payload_too_large")
