"""Losses and optimizers through the unmodified SDK, with a second tenant's work in the same passes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import BASE_NAME, FLOW_SECONDS, Service
from tests.e2e.sdk_losses import ADVANTAGES, DRIFT

SCRIPT = Path(__file__).with_name("sdk_losses.py")
RATIO = np.exp(DRIFT)


@pytest.fixture(scope="module")
def seen(service: Service) -> dict[str, Any]:
    """Output of the script."""
    command = [sys.executable, str(SCRIPT), service.base_url, service.key, service.other_key, BASE_NAME]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=FLOW_SECONDS)
    assert finished.returncode == 0, finished.stderr[-4000:]
    found: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    return found


def clip(ratio: np.ndarray, low: float = 0.8, high: float = 1.2) -> np.ndarray:
    """The ratio within the thresholds."""
    return np.clip(ratio, low, high)


def test_each_public_policy_loss_has_the_value_of_its_formula(seen: dict[str, Any]) -> None:
    """A threshold and ``beta`` come from the request's config. ``dro`` has a term of the prompt's tokens, too: no mask."""
    logp, advantages = np.array(seen["logp"]), np.array(ADVANTAGES)
    of_prompt = -0.25 * np.array(seen["prompt"]) ** 2
    expected = {
        "importance_sampling": RATIO * advantages,
        "ppo": np.minimum(RATIO * advantages, clip(RATIO) * advantages),
        "cispo": clip(RATIO, low=0.0, high=1.1) * logp * advantages,
        "dro": np.concatenate([of_prompt, logp * advantages - 0.25 * np.array(DRIFT) ** 2]),
    }
    for loss, terms in expected.items():
        assert seen[loss]["loss:sum"] == pytest.approx(-terms.sum(), rel=1e-4), loss


def test_gspo_clips_a_sequence_by_its_one_ratio(seen: dict[str, Any]) -> None:
    ratio, advantages = np.full(4, np.exp(np.mean(DRIFT))), np.array(ADVANTAGES)
    expected = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).sum()
    assert seen["gspo"]["loss:sum"] == pytest.approx(expected, rel=1e-4)


def test_gspo_without_a_mask_takes_the_sampled_tokens(seen: dict[str, Any]) -> None:
    """The cookbook's ``rl.train`` sends none."""
    assert seen["unmarked"] == pytest.approx(seen["gspo"], rel=1e-5)


def test_stable_reinforce_adds_its_divergence(seen: dict[str, Any]) -> None:
    """No ratio reaches the cap of 2."""
    expected = 0.5 * (RATIO - 1 - DRIFT) - RATIO * seen["logp"] * ADVANTAGES
    assert seen["stable_reinforce"]["loss:sum"] == pytest.approx(expected.sum(), rel=1e-4)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"])
def test_policy_metrics_leave_the_prompt_out(seen: dict[str, Any], loss: str) -> None:
    metrics = seen[loss]
    assert metrics["sampled_tokens:sum"] == len(DRIFT)
    assert metrics["ratio_outside:mean"] == 0.5
    assert metrics["ratio:max"] == pytest.approx(np.exp(0.3), rel=1e-4)
    assert metrics["sampling_kl:mean"] == pytest.approx(np.mean(RATIO - 1 - DRIFT), rel=1e-3)


def test_a_loss_that_lacks_its_input_is_refused_by_name(seen: dict[str, Any]) -> None:
    assert "gspo needs advantages" in seen["refused"]


def test_the_other_tenants_losses_are_its_own(seen: dict[str, Any]) -> None:
    assert len(seen["beside"]) == 6
    beside = [*seen["beside"], *seen["dimuon"]["beside"]]
    assert beside == pytest.approx([seen["alone"]] * len(beside), rel=1e-5)


def test_a_custom_loss_on_the_server_trains_as_in_the_client(seen: dict[str, Any]) -> None:
    """The SDK's own way through the client is the reference: loss, metrics, logprobs, gradient and the weights after a step."""
    found = seen["custom"]
    assert found["is_uploaded"]
    server, client = found["server"], found["client"]
    assert set(client["metrics"]) <= set(server["metrics"])
    for name in ("loss:sum", "custom/ratio:mean", "custom/kept:sum"):
        assert server["metrics"][name] == pytest.approx(client["metrics"][name], rel=1e-5)
    assert server["norm"] == pytest.approx(client["norm"], rel=1e-5)
    for name in ("logprobs", "after"):
        assert server[name] == pytest.approx(client[name], abs=1e-5)
    assert [server["beside"], client["beside"]] == pytest.approx([found["alone"]] * 2, rel=1e-5)


def test_a_custom_loss_of_another_operator_is_refused_by_name(seen: dict[str, Any]) -> None:
    assert "linalg_svdvals" in seen["custom"]["refused"]


def test_a_forward_without_the_adapter_gives_the_bases_logprobs(seen: dict[str, Any]) -> None:
    """The numbers equal a base sampler's; the adapter has been trained away from it."""
    found = seen["reference"]
    assert found["bare"] == pytest.approx(found["sampled"], abs=1e-4)
    assert max(abs(one - other) for one, other in zip(found["bare"], found["own"], strict=True)) > 1e-2
    assert "call forward instead" in found["refused"]


def test_dimuon_trains_and_goes_on_from_its_saved_state(seen: dict[str, Any]) -> None:
    found = seen["dimuon"]
    assert found["losses"][-1] < 0.5 * found["losses"][0]
    assert found["resumed"] == found["goes_on"]
    assert "created for dimuon" in found["refused"]
