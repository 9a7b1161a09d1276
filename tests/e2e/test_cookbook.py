"""tinker-cookbook 0.6.1 against the service: its recipes and its other uses run or are refused, and the page says which.

The recipes run in two processes at once, each with another tenant's key.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.pages.markdown import table
from testing.service_process import ServiceProcess
from tests.conftest import ROOT
from tests.e2e.conftest import SDK_FOLDERS, make_tenant
from tests.e2e.cookbook_datasets import write_datasets

BASE_NAME = "Qwen/Qwen3-8B-Base"
"""A base that the cookbook knows by its name: some recipes look their renderer up by it."""
FOLDER = Path(__file__).parent
SECONDS = 600
PAGE = ROOT / "docs" / "reference" / "cookbook.md"
SEEN = ROOT / "build" / PAGE.name
"""Page as the test saw it, for copying."""
RL = "`recipes.math_rl.train`"
CODE = {
    "rl in step": RL,
    "rl resumed": f"{RL} with `behavior_if_log_dir_exists=resume`",
    "rl asynchronous": f"{RL} with `max_steps_off_policy`",
    "rl by minibatches": f"{RL} with `stream_minibatch_config`, `num_substeps`",
    **{
        f"rl by {loss}": f"{RL} with `loss_fn={loss}`"
        for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo")
    },
    "preferences by pairs": "`recipes.preference.shorter.train`",
    "dpo": "`recipes.preference.dpo.train`",
    "distillation on policy": "`recipes.distillation.on_policy_distillation`",
    "several teachers": "`recipes.distillation.on_policy_multi_teacher`",
    "distillation off policy": "`recipes.distillation.off_policy_reasoning`",
    "soft targets": "`distillation.train_off_policy`",
    "self-distillation": "`recipes.sdft.train`",
    "prompt distillation": "`recipes.prompt_distillation.train`",
    "chats of a file": "`recipes.chat_sl.train`",
    **{name: f"`recipes.{name}`" for name in ("sl_loop", "sl_basic", "rl_loop")},
    "benchmark": "`eval.benchmarks` with `gsm8k`",
    "chat": "`chat_app`",
    "images": "`scripts.inkling`, renderers with images",
}
"""Code of the page by use, where it is not the recipe or module of the use's name."""
_HEAD = """# tinker-cookbook

*Generated from what `tests/e2e/test_cookbook.py` saw; the test compares.*

Uses of tinker-cookbook 0.6.1 with SDK 0.38.0: its code as it is, its recipes by their own command lines. The base is tiny and
random, the hub's data sets are small stand-ins of the same names and columns, and a run takes one to six steps. `weights`
(download, merge) runs in another test: [take weights out](../how-to/take-weights-out.md). Recipes that need other services
(sandboxes, judges, search) were not run.

What the cookbook knows by a model's name, it knows of its own list only: give `renderer_name` and `learning_rate` for
other bases. `scripts.get_access_token` asks the hosted service, whose address is in its source; a client exchanges its key for a
token by itself.

"""


@dataclass(frozen=True)
class Seen:
    """Outcomes by use, empty or an error, and the folder with each recipe's logs."""

    outcomes: dict[str, str]
    logs: Path

    def metrics(self, recipe: str) -> list[dict[str, Any]]:
        """Return the lines of a recipe's ``metrics.jsonl``."""
        return [json.loads(line) for line in (self.logs / recipe / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Seen]:
    """Outcomes of three processes: two tenants' recipes, and the other uses."""
    folder = tmp_path_factory.mktemp("cookbook")
    (logs := folder / "logs").mkdir()
    (sets := folder / "sets").mkdir()
    write_datasets(sets)
    with ServiceProcess(data=folder / "data", base_models=[f"{BASE_NAME}={tiny_model_dir}"]) as service:
        keys = [make_tenant(folder / "data", name) for name in ("first", "second")]
        scripts = [
            (keys[0], ["sdk_cookbook_recipes.py", "first", BASE_NAME, str(logs)]),
            (keys[1], ["sdk_cookbook_recipes.py", "second", BASE_NAME, str(logs)]),
            (keys[1], ["sdk_cookbook_parts.py", BASE_NAME, str(folder)]),
        ]
        started = [_start(service, key, script, cwd=sets) for key, script in scripts]
        outcomes: dict[str, str] = {}
        for process in started:
            printed, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors[-4000:]
            outcomes |= json.loads(printed.strip().splitlines()[-1])
        yield Seen(outcomes, logs)


def _start(service: ServiceProcess, key: str, script: list[str], *, cwd: Path) -> subprocess.Popen[str]:
    environment = {
        "PYTHONPATH": str(SDK_FOLDERS / "tinker-cookbook-0.6.1"),
        "TINKER_BASE_URL": service.base_url,
        "TINKER_API_KEY": key,
        "TINKER_TELEMETRY": "0",
        "HF_ENDPOINT": service.base_url,
        "HF_TOKEN": key,
        "HF_HOME": str(cwd.parent / "hub" / script[1].replace("/", "-")),
    }
    return subprocess.Popen(
        [sys.executable, str(FOLDER / script[0]), *script[1:]],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_each_use_of_the_cookbook_runs_or_is_refused_with_the_reason_that_the_page_gives(seen: Seen) -> None:
    rows = [
        (use, CODE.get(use, f"`{use}`"), "refused" if why else "runs", reason_of(why))
        for use, why in seen.outcomes.items()
    ]
    page = _HEAD + table(("use", "code", "outcome", "reason"), rows)
    if not PAGE.exists() or PAGE.read_text() != page:
        SEEN.parent.mkdir(exist_ok=True)
        SEEN.write_text(page)
        pytest.fail(f"the page is not current: cp {SEEN.relative_to(ROOT)} {PAGE.relative_to(ROOT)}")


def test_a_supervised_recipe_learns(seen: Seen) -> None:
    losses = [line["train_mean_nll"] for line in seen.metrics("sl_loop")]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 1


def test_rl_recipes_train_and_a_resumed_one_goes_on_at_its_step(seen: Seen) -> None:
    trained = [line["step"] for line in seen.metrics("rl in step") if line.get("tokens/trained")]
    assert trained == [0, 1, 2], "two steps, then one more"


@pytest.mark.parametrize("recipe", ["rl in step", "rl asynchronous"])
def test_sampler_and_trainer_agree_by_the_cookbooks_own_metric(seen: Seen, recipe: str) -> None:
    """Samples of the weights that are trained, in float32."""
    first = seen.metrics(recipe)[0]
    assert abs(first["optim/kl_sample_train_v1"]) < 1e-6
    assert abs(first["optim/kl_sample_train_v2"]) < 1e-6


def reason_of(refusal: str) -> str:
    """Return the service's own words of an error that the SDK shows."""
    detail = refusal.partition("'detail': ")[2]
    return detail[1:].partition(detail[0])[0] if detail else refusal
