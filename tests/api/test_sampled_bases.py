"""Samples that no sampler can serve are refused when the sampler is made, or the sample sent, with what to change."""

from dataclasses import replace

import pytest

from contracts.paths import Segment
from store.sampled_bases import samples_on_vllm
from store.settings import Settings
from tests.api.conftest import BASE


@pytest.fixture
def settings(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    return settings.model_copy(update=getattr(request, "param", {}))


async def make_sampler(tenant, **of) -> tuple[int, dict]:
    body = {"session_id": await tenant.session(), "sampling_session_seq_id": 0, **of}
    answer = await tenant.http.post("/create_sampling_session", json=body)
    return answer.status_code, answer.json()


def on_vllm(**changes):
    """Settings of a service whose samples are drawn by vLLM."""
    return pytest.mark.parametrize("settings", [{"vllm_urls": ("http://gpu1:8000",), **changes}], indirect=True)


async def of_run(tenant) -> dict:
    run = await tenant.run()
    await tenant.checkpoint(run, "sampler", segment=Segment.SAMPLER_WEIGHTS)
    return {"model_path": f"tinker://{run}/sampler_weights/sampler"}


@on_vllm(vllm_head_adapters=False)
async def test_an_adapter_with_a_head_gets_no_sampler_where_none_takes_it(cats, dogs) -> None:
    status, refused = await make_sampler(cats, **await of_run(cats))
    assert (status, refused["code"]) == (400, "invalid_request")
    assert "train_unembed=False" in refused["detail"]
    assert (await make_sampler(dogs, base_model=BASE))[0] == 200


@on_vllm()
@pytest.mark.parametrize(("architecture", "status"), [("Qwen3ForCausalLM", 200), ("Qwen2ForCausalLM", 400)])
async def test_by_default_a_head_is_taken_where_vllm_takes_one(cats, dogs, architecture: str, status: int) -> None:
    """The operator is asked for nothing that no setting changes. Another tenant samples the bare base."""
    bases = cats.service.services.bases
    bases[BASE] = replace(bases[BASE], architecture=architecture)
    found, told = await make_sampler(cats, **await of_run(cats))
    assert found == status
    assert status == 200 or told["detail"].endswith("train with train_unembed=False")
    assert (await make_sampler(dogs, base_model=BASE))[0] == 200


@on_vllm(max_rank=4)
async def test_an_adapter_of_a_rank_beyond_the_samplers_gets_none(cats, dogs) -> None:
    status, refused = await make_sampler(cats, **await of_run(cats))
    assert (status, refused["code"]) == (400, "invalid_request")
    assert "rank is 8" in refused["detail"]
    assert "up to 4" in refused["detail"]
    assert (await make_sampler(dogs, base_model=BASE))[0] == 200


@pytest.mark.parametrize("settings", [{"max_rank": 4, "vllm_head_adapters": False}], indirect=True)
async def test_the_torch_sampler_takes_every_adapter(cats) -> None:
    assert (await make_sampler(cats, **await of_run(cats)))[0] == 200


@on_vllm(vllm_context_length=32)
async def test_a_sample_beyond_the_samplers_context_is_refused_at_once(cats, dogs) -> None:
    """The base's own context is 128."""
    for tenant, tokens, expected in ((cats, 40, 400), (dogs, 20, 200)):
        sampler = (await make_sampler(tenant, base_model=BASE))[1]["sampling_session_id"]
        body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1] * tokens}]}}
        answer = await tenant.http.post("/asample", json=body)
        assert answer.status_code == expected, answer.text
        assert expected == 200 or "holds 32" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ((), False),
        (("http://a:1",), True),
        (("unix:///a.sock#left",), True),
        (("other/base=http://a:1",), False),
        ((f"{BASE}=http://a:1#left",), True),
        (("x=y=http://a:1", f"{BASE}=https://b:1"), True),
    ],
)
def test_servers_of_other_bases_do_not_count(urls: tuple[str, ...], expected: bool) -> None:
    assert samples_on_vllm(Settings(vllm_urls=urls), BASE) is expected
    assert samples_on_vllm(Settings(vllm_urls=urls, vllm_replicas=1), BASE)
