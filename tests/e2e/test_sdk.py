"""The unmodified SDKs, old and new, through the whole story over real HTTP, with every POST repeated.

``WEFT_TEST_SDKS`` names the versions, unpacked in ``.venv/sdks``; ``make sdk-matrix`` takes every released minor version.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.repeating_proxy import RepeatingProxy

CURRENT = "0.38.0"
"""The version that is installed."""
OLD = "0.18.2"
VERSIONS = os.environ.get("WEFT_TEST_SDKS", f"0.6.3 {OLD} 0.26.2 {CURRENT}").split()
EXTERNAL = (0, 28)
"""The first version that saves external weights."""
WITHOUT_ARCHIVES = (0, 36)
"""The first version whose client cannot ask for a checkpoint as one tar."""
BESIDE = Path(__file__).with_name("sdk_beside.py")
MEOW = [109, 101, 111, 119]


def check_story(seen: dict[str, Any]) -> None:
    """Check the story that any SDK must have seen."""
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
    check_listed(seen)
    check_downloaded(seen)
    assert seen["checkpoints_left"] == ["weights/state"]


def check_listed(seen: dict[str, Any]) -> None:
    """Check the lists of the run and its checkpoints."""
    listed = seen["listed"]
    assert listed["run"] == seen["run"]
    assert seen["run"] in listed["runs"]
    assert listed["rank"] == [8, 8]
    assert listed["checkpoints"] == ["sampler_weights/sampler", "weights/state"]
    assert listed["of_user"] == ["sampler"]
    assert listed["session"]


def check_downloaded(seen: dict[str, Any]) -> None:
    """Every way to download that the SDK has gives a PEFT folder's files."""
    sdk = tuple(map(int, seen["sdk"].split(".")[:2]))
    ways = {"archive"} if sdk < EXTERNAL else {"external"} if sdk >= WITHOUT_ARCHIVES else {"archive", "external"}
    assert set(seen["downloaded"]) == ways
    for config, weights in seen["downloaded"].values():
        assert config > 100
        assert weights > 100_000


@pytest.mark.parametrize("sdk", VERSIONS)
def test_unmodified_sdk_trains_samples_lists_downloads_and_deletes(
    service: Service, run_flow: Callable[..., dict[str, Any]], sdk: str
) -> None:
    seen = run_flow(service.base_url, service.key, sdk=sdk)
    assert seen["sdk"] == sdk
    check_story(seen)


@pytest.mark.parametrize("sdk", [CURRENT, OLD])
def test_every_post_repeated_changes_nothing(
    service: Service, run_flow: Callable[..., dict[str, Any]], sdk: str
) -> None:
    with RepeatingProxy(service.base_url) as proxy:
        seen = run_flow(proxy.base_url, service.other_key, sdk=sdk)
    check_story(seen)
    assert proxy.repeated > 60
    assert proxy.disagreements == []


@pytest.mark.parametrize("sdk", [CURRENT, OLD])
def test_wefts_client_works_beside_the_sdk_in_one_process(
    service: Service, run_flow: Callable[..., dict[str, Any]], sdk: str
) -> None:
    seen = run_flow(service.base_url, service.key, sdk=sdk, script=BESIDE)
    assert seen["sdk"] == sdk
    assert seen["points"] == [[step, pytest.approx(loss)] for step, loss in enumerate(seen["losses"], 1)]
    assert seen["losses"][-1] < seen["losses"][0]
    assert seen["streamed"] == {"tokens": seen["drawn"], "whole": seen["drawn"], "made_by": 1}
    assert len(seen["drawn"]) == 8
    assert seen["listed"]
