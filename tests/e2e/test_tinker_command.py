"""The unmodified ``tinker`` command: every subcommand runs, or is refused with a reason. The page says which."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.pages.markdown import table
from tests.conftest import ROOT
from tests.e2e.conftest import BASE_NAME, Service, make_key

SCRIPT = Path(__file__).with_name("tinker_command.py")
PUSH = Path(__file__).with_name("sdk_push.py")
COOKBOOK = Path(__file__).with_name("sdk_cookbook.py")
PAGE = ROOT / "docs" / "reference" / "tinker-command.md"
SEEN = ROOT / "build" / PAGE.name
"""Page as the test saw it, for copying."""
_HEAD = """# The tinker command

*Generated from what `tests/e2e/test_tinker_command.py` saw; the test compares.*

Each subcommand of the unmodified `tinker` command (SDK 0.38.0), with `TINKER_BASE_URL` and an administrator's
`TINKER_API_KEY` set.
`auth login` and `auth logout` print links to the hosted service's console, which does not know weft's keys: an
operator's `weft key` takes its place.

"""


def test_every_subcommand_runs_or_is_refused_with_the_reason_that_the_page_gives(
    service: Service, tmp_path: Path
) -> None:
    key = make_key(service.data, "first", role="admin")
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), service.base_url, key, BASE_NAME],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    seen = json.loads(finished.stdout.strip().splitlines()[-1])
    outcomes: dict[str, str] = seen["outcomes"]
    assert sorted(outcomes) == seen["subcommands"]
    refused = {command: why for command, why in outcomes.items() if why}
    assert all(why.startswith("weft does not offer") for why in refused.values()), refused
    assert seen["traces"] == 1
    # A prompt counts once for its two sequences; both saves, and the one of the sampler, have ended.
    assert seen["billed"] == {"training": 5, "sampling_prefill": 5, "sampling_sample": 8, "checkpoint": 3}
    assert seen["billed_in_json"] == seen["billed"]
    assert seen["stored_in_json"]
    assert seen["rows"] > len(seen["billed"])
    assert "weights/kept" in seen["left"]
    assert "weights/gone" not in seen["left"]
    assert seen["downloaded"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert (seen["repositories"], seen["is_pushed_whole"]) == (["me/mine"], True)
    assert seen["pushed"] == ["README.md", *seen["downloaded"]]
    rows = [(f"`tinker {command}`", "refused" if why else "runs", why) for command, why in outcomes.items()]
    page = _HEAD + table(("subcommand", "outcome", "reason"), rows)
    if not PAGE.exists() or PAGE.read_text() != page:
        SEEN.parent.mkdir(exist_ok=True)
        SEEN.write_text(page)
        pytest.fail(f"the page is not current: cp {SEEN.relative_to(ROOT)} {PAGE.relative_to(ROOT)}")


def test_the_command_of_an_older_sdk_pushes_an_adapter_whole(service: Service, tmp_path: Path) -> None:
    """SDKs before 0.36 take the archive, and know a whole one by its last file. Another tenant's key pushes nothing."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / ".venv/sdks" / "tinker-0.34.0")}
    finished = subprocess.run(
        [sys.executable, str(PUSH), service.base_url, service.key, service.other_key, BASE_NAME],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=environment,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    seen = json.loads(finished.stdout.strip().splitlines()[-1])
    assert (seen["version"], seen["repositories"]) == ("0.34.0", ["me/mine"])
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= set(seen["pushed"])
    assert {"checkpoint_complete", "optimizer.safetensors"}.isdisjoint(seen["pushed"])
    assert seen["refused"] != 0


def test_what_the_cookbook_asks_around_its_loops_is_answered(service: Service) -> None:
    """Metadata of any JSON, a long display name, a run found by its path, a teacher's alternatives, a repeated deletion."""
    command = [sys.executable, str(COOKBOOK), service.base_url, service.other_key, BASE_NAME]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr[-3000:]
    seen = json.loads(finished.stdout.strip().splitlines()[-1])
    metadata = {"renderer_name": "role_colon", "wandb_link": "none", "step": "3", "flags": '{"dirty":true}'}
    for name in ("trained", "resumed"):
        assert seen[name] == {"metadata": metadata, "base": BASE_NAME, "owner": "second"}
    assert (seen["logprobs"], seen["topk"], seen["sampled_base"]) == (6, [0, 4, 4, 4, 4, 4, 4], BASE_NAME)
    assert (seen["whoami"], seen["left"]) == ("tml:organization:second", 1)
    assert seen["audit"] == "runs"
