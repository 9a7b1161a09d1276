"""Unmodified SDKs, old and new, under a rate and under a budget that is spent and raised: they wait, and lose nothing."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from testing import operator_command
from tests.e2e.archived_weights import weights
from tests.e2e.conftest import BASE_NAME, Service, make_tenant
from tests.e2e.led_client import led

SCRIPT = Path(__file__).with_name("sdk_paced.py")
SECONDS = 480
RATES = {
    "train_tokens_per_minute": 180,
    "train_tokens_burst": 9,
    "sample_tokens_per_minute": 180,
    "sample_tokens_burst": 9,
}
REQUESTS = "requests_per_minute"
SDKS = ("0.38.0", "0.18.2")
BUDGETS = ("tokens", "money")
LEAST_SECONDS = 8.5
"""Three of four passes of nine tokens wait for three seconds each; the burst lets the first run at once."""


@pytest.fixture(scope="module")
def paced(exact: Service) -> Service:
    """A service with a price of a millionth of a dollar for a token."""
    for meter in ("train_tokens", "prompt_tokens", "sampled_tokens"):
        weft(exact, "price", "add", meter, "1")
    return exact


def weft(service: Service, *words: str) -> str:
    """The output of a ``weft`` command on the running service's database."""
    return operator_command.weft(service.data, *words)


def story(service: Service, tenant: str, sdk: str, budget: str | None = None) -> dict[str, Any]:
    """Return the script's findings, and a digest of its weights.

    With ``budget`` the tenant has a rate, then a budget in that; with one in money the rate is its key's.
    All the while its rate of requests is used up.
    """
    bounded = budget is not None
    key = make_tenant(service.data, tenant)
    command = [sys.executable, str(SCRIPT), service.base_url, key, BASE_NAME, "bounded" if bounded else "free"]
    rates = [word for name, value in {**RATES, REQUESTS: 1}.items() for word in ("--limit", f"{name}={value}")]
    free = [word for name in RATES for word in ("--limit", f"{name}=default")]
    paced = ("key", "set", key) if budget == "money" else ("tenant", "set", tenant)
    orders = {
        "rate": [(*paced, *rates)],
        "spend": [(*paced, *free), ("tenant", "budget", tenant, *_amounts(budget, spent=True))],
        "raise": [("tenant", "budget", tenant, *_amounts(budget, spent=False))],
    }

    def obey(word: str) -> None:
        for order in orders[word] if bounded else ():
            weft(service, *order)
        if bounded and word == "rate":
            # From here on every request that counts is refused. The client's own may have been the one of the minute.
            assert 429 in [listed(service, key) for _ in range(3)]

    seen = led(command, sdk, obey=obey, seconds=SECONDS)
    if bounded:
        weft(service, *paced, "--limit", f"{REQUESTS}=default")
    return {**seen, "weights": weights(service, key, seen["path"])}


def _amounts(budget: str | None, *, spent: bool) -> list[str]:
    """Options of a budget that ten tokens more than spend, or that has room again."""
    if budget == "money":
        return ["--currency", "USD", "--total", "0.00001" if spent else "1000"]
    return ["--total", "10", "--day", "1000000"] if spent else ["--total", "1000000"]


def listed(service: Service, key: str) -> int:
    """Return the status of a request that counts."""
    return httpx.get(f"{service.base_url}/api/v1/training_runs", headers={"X-API-Key": key}, timeout=60).status_code


@pytest.fixture(scope="module")
def stories(paced: Service) -> dict[tuple[str, str | None], dict[str, Any]]:
    """The stories by SDK and budget, all at once; the one of a tenant without rate and budget is the same with every SDK."""
    asked = [*product(SDKS, BUDGETS), (version("tinker"), None)]
    with ThreadPoolExecutor(len(asked)) as threads:
        told = threads.map(lambda one: story(paced, f"{one[1] or 'free'}-{one[0]}", *one), asked)
        return dict(zip(asked, told, strict=True))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("sdk", SDKS)
def test_the_sdk_waits_for_a_rate_of_tenant_or_key_and_for_its_budget_and_loses_nothing(
    stories: dict[tuple[str, str | None], dict[str, Any]], sdk: str, budget: str
) -> None:
    bounded, free = stories[sdk, budget], stories[version("tinker"), None]
    assert bounded["losses"] == free["losses"]
    assert bounded["samples"] == free["samples"]
    assert bounded["weights"] == free["weights"]
    assert bounded["training_seconds"] > LEAST_SECONDS
    assert bounded["was_paused"]
    assert not bounded["was_done"]
    told = " ".join(bounded["told_of_budget"])
    assert f"total budget in {'USD' if budget == 'money' else 'tokens'} is spent" in told
    # The new SDK is answered 402 and comes again; the old one would give up: its work is accepted and held.
    assert ("billing status" in told) == (sdk == "0.38.0")
    assert not free["told_of_budget"]
