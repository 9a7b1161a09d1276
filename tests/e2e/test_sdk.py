"""The unmodified SDKs, old and new, through the whole story over real HTTP, with every POST repeated."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.repeating_proxy import RepeatingProxy

CURRENT = None
OLD = "0.18.2"
MEOW = [109, 101, 111, 119]


def check_story(seen: dict[str, Any]) -> None:
    """What any SDK must have seen."""
    assert BASE_NAME in seen["models"]
    assert seen["info_model"] == BASE_NAME
    losses = seen["losses"]
    assert losses[-1] < 0.1 * losses[0]
    assert seen["chunks_agree"]
    assert seen["resumed_loss"] == seen["next_loss"]
    assert seen["reloaded_loss"] == seen["next_loss"]
    for name in ("importance_sampling", "ppo"):
        assert seen["rl_losses"][name] == pytest.approx(-7.0, abs=1e-3), name
    assert any(name.endswith("loss:sum") for name in seen["custom"])
    assert "mine" in seen["custom"]
    assert seen["adapter_says"] == MEOW * 3
    assert seen["unnamed_says"] == MEOW * 3
    assert seen["base_says"] != MEOW * 3
    assert seen["seed_repeats"]
    assert seen["samples_differ"]
    assert seen["stopped"] == MEOW
    assert seen["prompt_logprobs"][0] is None
    assert seen["prompt_logprobs"][1:] == pytest.approx(seen["trainer_logprobs"], abs=1e-4)
    assert seen["checkpoints"] == ["sampler_weights/sampler", "weights/state"]
    assert seen["checkpoints_left"] == ["weights/state"]


@pytest.mark.parametrize("sdk", [CURRENT, OLD], ids=["0.38.0", OLD])
def test_unmodified_sdk_trains_and_samples(
    service: Service, run_flow: Callable[..., dict[str, Any]], sdk: str | None
) -> None:
    seen = run_flow(service.base_url, service.key, sdk=sdk)
    assert seen["sdk"] == (sdk or "0.38.0")
    check_story(seen)


@pytest.mark.parametrize("sdk", [CURRENT, OLD], ids=["0.38.0", OLD])
def test_every_post_repeated_changes_nothing(
    service: Service, run_flow: Callable[..., dict[str, Any]], sdk: str | None
) -> None:
    with RepeatingProxy(service.base_url) as proxy:
        seen = run_flow(proxy.base_url, service.other_key, sdk=sdk)
    check_story(seen)
    assert proxy.repeated > 60
    assert proxy.disagreements == []
