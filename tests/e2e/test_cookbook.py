"""tinker-cookbook 0.6.1 against the service: each of its uses of the SDK runs or is refused, and the page says which."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.pages.markdown import table
from tests.conftest import ROOT
from tests.e2e.conftest import BASE_NAME, SDK_FOLDERS, Service

SCRIPT = Path(__file__).with_name("sdk_cookbook_loops.py")
PAGE = ROOT / "docs" / "reference" / "cookbook.md"
SEEN = ROOT / "build" / PAGE.name
"""Page as the test saw it, for copying."""
AS_IT_IS = ("checkpoint_utils", "tokenizer_utils", "scripts.copy_checkpoint", "scripts.save_audit_log")
_HEAD = """# tinker-cookbook

*Generated from what `tests/e2e/test_cookbook.py` saw; the test compares.*

Each use that tinker-cookbook 0.6.1 makes of the SDK and the service (SDK 0.38.0).

- *As it is*: the module's own code runs in the test.
- *Calls*: the module needs packages that the test does not have. Its calls are made by hand, in its order and with its
  arguments.

`weights` (download, merge) runs as it is in another test: [take weights out](../how-to/take-weights-out.md). Renderers of text,
tool use, sandboxes and stores ask nothing of a service.

What the cookbook knows by a model's name, it knows of its own list only: give `renderer_name` and `learning_rate` for
other bases. `scripts.get_access_token` asks the hosted service, whose address is in its source; a client exchanges its key for a
token by itself.

"""


def test_each_use_of_the_cookbook_runs_or_is_refused_with_the_reason_that_the_page_gives(
    service: Service, tmp_path: Path
) -> None:
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), BASE_NAME, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        env={
            **os.environ,
            "PYTHONPATH": str(SDK_FOLDERS / "tinker-cookbook-0.6.1"),
            "TINKER_BASE_URL": service.base_url,
            "TINKER_API_KEY": service.key,
            "TINKER_TELEMETRY": "0",
            "HF_ENDPOINT": service.base_url,
            "HF_TOKEN": service.key,
            "HF_HOME": str(tmp_path / "hub"),
        },
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    outcomes: dict[str, str] = json.loads(finished.stdout.strip().splitlines()[-1])
    rows = [
        (f"`{part}`", "as it is" if part in AS_IT_IS else "calls", "refused" if why else "runs", reason_of(why))
        for part, why in outcomes.items()
    ]
    page = _HEAD + table(("module", "how", "outcome", "reason"), rows)
    if not PAGE.exists() or PAGE.read_text() != page:
        SEEN.parent.mkdir(exist_ok=True)
        SEEN.write_text(page)
        pytest.fail(f"the page is not current: cp {SEEN.relative_to(ROOT)} {PAGE.relative_to(ROOT)}")


def reason_of(refusal: str) -> str:
    """Return the service's own words of an error that the SDK shows."""
    detail = refusal.partition("'detail': ")[2]
    return detail[1:].partition(detail[0])[0] if detail else refusal
