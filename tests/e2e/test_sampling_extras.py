"""Scores and draws at a prompt's positions and the prefix cache's count, through the SDK, beside another tenant's."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BASE_NAME, FLOW_SECONDS, Service
from tests.e2e.sdk_sampling_extras import LIKELIEST, PROMPT

SCRIPT = Path(__file__).with_name("sdk_sampling_extras.py")
PROVENANCE = SCRIPT.with_name("sdk_provenance.py")
ROWS = (0, 7, len(PROMPT) - 2)
TOLERANCE = 1e-4


def seen_on(service: Service, script: Path = SCRIPT) -> dict[str, Any]:
    """Output of the script."""
    command = [sys.executable, str(script), service.base_url, service.key, service.other_key, BASE_NAME]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=FLOW_SECONDS)
    assert finished.returncode == 0, finished.stderr[-4000:]
    found: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    return found


def check_extras(seen: dict[str, Any]) -> None:
    """Check both tenants' scores against scores that the SDK gets in other ways, and that they are different adapters'."""
    for one in (seen["ours"], seen["theirs"]):
        assert [one["dense"][row][0] for row in ROWS] == pytest.approx(one["own"], abs=TOLERANCE)
        assert one["dense"][-1][1] == pytest.approx(one["other"], abs=TOLERANCE)
        assert all(one["dense"][row] == [0, 0] for row in range(len(PROMPT) - 1) if row not in ROWS)
        assert one["listed"] == 2 * len(ROWS)
        assert one["likeliest"] == LIKELIEST
        assert one["all"] == pytest.approx(one["all_own"], abs=TOLERANCE)
        for row in ROWS:
            assert one["sparse"][row] == pytest.approx(one["dense"][row], abs=TOLERANCE)
        assert one["drawn"] == pytest.approx(one["drawn_again"], abs=TOLERANCE)
        assert one["shape"] == [len(PROMPT) - 1, 3]
        assert one["scored"] == [len(PROMPT) - 2, len(PROMPT) - 1]
    assert abs(seen["ours"]["other"] - seen["theirs"]["other"]) > 10 * TOLERANCE


def test_the_torch_sampler_gives_them_and_reuses_no_prompt(service: Service) -> None:
    seen = seen_on(service)
    check_extras(seen)
    assert seen["hits"] == [0] * 6


def test_vllm_gives_them_and_counts_its_prefix_cache_by_adapter_and_tenant(vllm_service: Service) -> None:
    seen = seen_on(vllm_service)
    check_extras(seen)
    ours, again, theirs, bare, bare_again, others_bare = seen["hits"]
    assert (ours, theirs, bare, others_bare) == (0, 0, 0, 0)
    assert min(again, bare_again) > seen["length"] // 2


def check_provenance(seen: dict[str, Any]) -> None:
    """Check that named samples train with weft's record of them, and that no other name does."""
    assert seen["named"] == pytest.approx(seen["given"], rel=1e-6)
    assert seen["lied"] == pytest.approx(seen["given"], rel=1e-6)
    assert seen["again"] == pytest.approx(seen["given"], rel=1e-6)
    assert [one.rpartition(":")[2] for one in seen["ids"]] == ["0", "1"]
    assert f"are not those of sequence {seen['ids'][0]!r} from 0 on" in seen["other_tokens"]
    assert "record_stability_info" in seen["unrecorded"]
    assert "there is no record of sequence" in seen["foreign"]
    assert "has no 13 tokens from 0 on" in seen["beyond"]
    assert "stable_reinforce needs logprobs" in seen["neither"]


def test_samples_that_are_named_train_with_the_logprobs_that_weft_recorded(either: Service) -> None:
    before = datetime.now(UTC)
    check_provenance(seen_on(either, PROVENANCE))
    check_a_days_life(either.data, before, datetime.now(UTC))


def check_a_days_life(data: Path, before: datetime, after: datetime) -> None:
    """Check that what was recorded between the two times can be named for a day."""
    with closing(sqlite3.connect(f"file:{data / 'weft.db'}?mode=ro", uri=True)) as database:
        ends = [datetime.fromisoformat(end) for (end,) in database.execute("SELECT expires_at FROM sample_records")]
    ours = [end.replace(tzinfo=UTC) - timedelta(days=1) for end in ends]
    assert any(before <= made <= after for made in ours)
    assert all(made <= after for made in ours)
