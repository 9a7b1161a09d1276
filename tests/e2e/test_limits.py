"""Unmodified SDKs, old and new, walk into every limit of their tenant: they wait or are told, and all else is done."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tenants.limits import LIMIT_NAMES
from testing.operator_command import weft
from tests.e2e.archived_weights import weights
from tests.e2e.conftest import BASE_NAME, Service, make_tenant
from tests.e2e.led_client import led
from tests.e2e.running_samples import rows, until

SCRIPT = Path(__file__).with_name("sdk_limits.py")
SECONDS = 480
SENT_AHEAD = 8
"""Operations that the script sends while the tenant is held: a pass and a step, four times."""
SDKS = ("0.38.0", "0.18.2")
ELSEWHERE = {
    "train_tokens_per_minute": "test_paced.py",
    "train_tokens_burst": "test_paced.py",
    "sample_tokens_per_minute": "test_paced.py",
    "sample_tokens_burst": "test_paced.py",
    "requests_per_minute": "test_paced.py",
    "sample_record_bytes": "the oldest records go, and no client is told",
    **dict.fromkeys(("run_metrics", "tenant_metrics", "webhooks", "keys"), "no SDK has a call for them"),
}
"""Limits that the script does not walk into, and why."""
TOLD = {
    "max_rank": "403 ",
    "metadata_bytes": "store its address",
    "session_samplers": "samplers",
    "sample_work": "4",
    "stored_bytes": "set a TTL",
    "checkpoints": "of 1 checkpoints",
    "seq_ahead": "ahead",
}
"""Part of what the SDK's user is told of each limit that refuses."""


def sent_of_newest_run(service: Service, tenant: str) -> int:
    """Return the number of operations that were sent for the tenant's newest run, without its creation."""
    runs = (
        "SELECT runs.id FROM runs JOIN tenants ON tenants.id = tenant_id WHERE name = ? ORDER BY runs.created_at DESC"
    )
    counted = f"SELECT COUNT(*) FROM operations WHERE lane = ({runs} LIMIT 1) AND kind <> 'create_model'"
    ((found,),) = rows(service, counted, tenant)
    return int(str(found))


def story(service: Service, tenant: str, sdk: str, *, is_bounded: bool) -> dict[str, Any]:
    """Return the script's findings, the digest of its weights, and the names of the limits that it asked for."""
    key = make_tenant(service.data, tenant)
    words: list[str] = []

    def obey(word: str) -> None:
        words.append(word)
        if not is_bounded:
            return
        if word == "resume":
            until(lambda: sent_of_newest_run(service, tenant) == SENT_AHEAD, "all steps were sent")
        if word in ("hold", "resume"):
            order = ("suspend", tenant, "--mode", "hold") if word == "hold" else ("resume", tenant)
            weft(service.data, "tenant", *order)
        else:
            weft(service.data, "tenant", "set", tenant, "--limit", word)

    seen = led([sys.executable, str(SCRIPT), service.base_url, key, BASE_NAME], sdk, obey=obey, seconds=SECONDS)
    walked = {word.partition("=")[0] for word in words if "=" in word}
    return {**seen, "weights": weights(service, key, seen["path"]), "walked": walked}


@pytest.fixture(scope="module")
def stories(exact: Service) -> dict[str | None, dict[str, Any]]:
    """The stories by SDK, all at once; None is that of a tenant whose limits are not changed, the same with every SDK."""
    with ThreadPoolExecutor(len(SDKS) + 1) as threads:
        told = {
            sdk: threads.submit(story, exact, f"bounded-{sdk}", sdk or version("tinker"), is_bounded=sdk is not None)
            for sdk in (*SDKS, None)
        }
        return {sdk: one.result() for sdk, one in told.items()}


@pytest.mark.parametrize("sdk", SDKS)
def test_a_client_that_knows_no_limits_gets_its_work_done_or_is_told_and_goes_on(
    stories: dict[str | None, dict[str, Any]], sdk: str
) -> None:
    bounded, free = stories[sdk], stories[None]
    # Requests that waited, or were sent again, took effect in order and once; refused ones left no hole.
    assert bounded["losses"] == free["losses"]
    assert bounded["samples"] == free["samples"]
    assert bounded["weights"] == free["weights"]
    assert bounded["waited"] == {"open_runs": True, "sessions": True}
    told = bounded["refused"]
    assert {name: part in told[name] for name, part in TOLD.items()} == dict.fromkeys(TOLD, True), told
    assert {told[name] for name in told.keys() - TOLD.keys()} == {""}, told
    assert set(free["refused"].values()) == {""}, free["refused"]


def test_every_limit_is_walked_into_or_it_is_said_why_not(stories: dict[str | None, dict[str, Any]]) -> None:
    assert sorted(stories[SDKS[0]]["walked"] | ELSEWHERE.keys()) == sorted(LIMIT_NAMES)
    assert not stories[SDKS[0]]["walked"] & ELSEWHERE.keys()


def test_a_tenants_limits_share_and_class_are_shown_with_their_use(
    exact: Service, stories: dict[str | None, dict[str, Any]]
) -> None:
    """After a story: what it has made is told as used."""
    weft(
        exact.data,
        "tenant",
        "set",
        f"bounded-{SDKS[0]}",
        "--limit",
        "checkpoints=9",
        "--share",
        "2",
        "--class",
        "batch",
    )
    shown = weft(exact.data, "tenant", "limits", f"bounded-{SDKS[0]}").splitlines()
    lines = {line.split("\t")[0]: line.split("\t")[1:] for line in shown}
    assert (lines["share"], lines["class"], lines["sessions"][1]) == (["2"], ["batch"], "default")
    assert lines["checkpoints"][:2] == ["9", "own"]
    assert int(lines["stored_bytes"][2]) > 0
