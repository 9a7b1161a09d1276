"""tinker-cookbook 0.6.1's own recipes, as its users start them; run as a script in the folder of ``cookbook_datasets``.

    PYTHONPATH=COOKBOOK TINKER_API_KEY=KEY TINKER_BASE_URL=URL HF_ENDPOINT=URL HF_TOKEN=KEY \\
        python sdk_cookbook_recipes.py WHO BASE_MODEL FOLDER

WHO is a key of ``RECIPES``. Each recipe's module runs as ``python -m`` runs it. All run in one process: each would load torch for
itself. Prints one JSON line: for each recipe an empty string, or its error.
"""

import asyncio
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tinker
from cookbook_datasets import CONVERSATIONS


@dataclass(frozen=True)
class Recipe:
    """A recipe's module below ``tinker_cookbook.recipes`` and its arguments; ``name`` is also its folder of logs."""

    name: str
    module: str
    arguments: Sequence[str]
    has_renderer: bool = True
    """True when a renderer's name is an argument; others look it up by the model's name."""


BASE = "{base}"
"""Stands for the base model in arguments."""
RESUME = "behavior_if_log_dir_exists=resume"
RL = ("env=arithmetic", "groups_per_batch=4", "group_size=4", "max_steps=2", "eval_every=1", "save_every=1")
RL_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
SMALL = ("max_steps=2", "batch_size=8", "max_length=256")
DISTIL = ("group_size=2", "max_tokens=8", "max_steps=2", "save_every=1")

FIRST = (
    Recipe("rl in step", "math_rl.train", RL),
    Recipe("rl resumed", "math_rl.train", (*RL, "max_steps=3", RESUME)),
    Recipe("rl asynchronous", "math_rl.train", (*RL, "max_steps_off_policy=2")),
    *(Recipe(f"rl by {loss}", "math_rl.train", (*RL, "max_steps=1", f"loss_fn={loss}")) for loss in RL_LOSSES),
    Recipe(
        "preferences by pairs",
        "preference.shorter.train",
        ("batch_size=2", "group_size=4", "max_tokens=8", "max_steps=2"),
    ),
    Recipe(
        "distillation on policy",
        "distillation.on_policy_distillation",
        (*DISTIL, "groups_per_batch=2", f"teacher_model={BASE}"),
    ),
)
SECOND = (
    Recipe("sl_loop", "sl_loop", ("batch_size=8", "max_length=256", "max_steps=6", "learning_rate=3e-3"), False),
    Recipe("sl_basic", "sl_basic", ("max_steps=1", "eval_every=1"), False),
    Recipe("rl_loop", "rl_loop", ("batch_size=2", "group_size=2", "max_tokens=8", "max_steps=1"), False),
    Recipe("chats of a file", "chat_sl.train", (*SMALL, f"dataset={CONVERSATIONS}", "eval_every=1")),
    Recipe("dpo", "preference.dpo.train", (*SMALL, "dataset=hhh")),
    Recipe("prompt distillation", "prompt_distillation.train", (*SMALL, f"file_path={CONVERSATIONS}")),
    Recipe("distillation off policy", "distillation.off_policy_reasoning", (*SMALL, "buffer_size=8", "max_prompts=16")),
    Recipe(
        "several teachers",
        "distillation.on_policy_multi_teacher",
        (
            *DISTIL,
            *(f"{data}_teacher_model={BASE}" for data in ("deepmath", "tulu3")),
            *(f"{data}_groups_per_batch=2" for data in ("deepmath", "tulu3")),
            "compute_post_kl=true",
        ),
    ),
    Recipe(
        "self-distillation",
        "sdft.train",
        ("groups_per_batch=2", "max_tokens=8", "max_steps=2", "topk=4", "eval_every=0"),
    ),
    Recipe(
        "rl by minibatches",
        "math_rl.train",
        (
            *RL,
            "num_substeps=2",
            "stream_minibatch_config.groups_per_batch=4",
            "stream_minibatch_config.num_minibatches=2",
        ),
    ),
)
RECIPES = {"first": FIRST, "second": SECOND}
RESUMES = {"rl resumed": "rl in step"}
"""Recipes that go on in the folder of another one."""


def run(recipe: Recipe, base_model: str, logs: Path) -> None:
    """Run the recipe's module with its command line."""
    module = f"tinker_cookbook.recipes.{recipe.module}"
    log_path = logs / RESUMES.get(recipe.name, recipe.name)
    given = [f"model_name={base_model}", f"log_path={log_path}", *recipe.arguments]
    if recipe.has_renderer:
        given.append("renderer_name=role_colon")
    # Of two arguments of one name the last one is meant; chz refuses both.
    options = dict(one.replace(BASE, base_model).split("=", 1) for one in given)
    sys.argv = [module, *(f"{name}={value}" for name, value in options.items())]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def soft_targets(base_model: str, logs: Path) -> None:
    """Train on a teacher's likeliest tokens; no recipe does."""
    from tinker_cookbook.distillation.datasets import TeacherConfig
    from tinker_cookbook.distillation.train_off_policy import Config, DatasetWithTeacher
    from tinker_cookbook.distillation.train_off_policy import main as train
    from tinker_cookbook.supervised.data import FromConversationFileBuilder
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=base_model, renderer_name="role_colon", max_length=256, batch_size=8
    )
    builder = FromConversationFileBuilder(file_path=CONVERSATIONS, common_config=common)
    config = Config(
        learning_rate=1e-3,
        dataset_configs=[
            DatasetWithTeacher(dataset_builder=builder, teacher_config=TeacherConfig(base_model=base_model))
        ],
        model_name=base_model,
        recipe_name="soft targets",
        renderer_name="role_colon",
        n_teacher_targets=4,
        batch_size=8,
        max_steps=2,
        save_every=1,
        log_path=str(logs / "soft targets"),
    )
    asyncio.run(train(config))


def benchmark(base_model: str, logs: Path) -> None:
    """Run a benchmark of the cookbook's on the base."""
    from tinker_cookbook import renderers
    from tinker_cookbook.eval.benchmarks import BenchmarkConfig, run_benchmark
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    sampler = tinker.ServiceClient().create_sampling_client(base_model=base_model).result()
    renderer = renderers.get_renderer("role_colon", get_tokenizer(base_model))
    config = BenchmarkConfig(save_dir=str(logs / "benchmark"), max_examples=2, max_tokens=8)
    found = asyncio.run(run_benchmark("gsm8k", sampler, renderer, config))
    assert found.num_examples == 2


def main(who: str, base_model: str, folder: Path) -> dict[str, str]:
    """Run the recipes one after the other and return their errors."""
    outcomes: dict[str, str] = {}
    uses: dict[str, Callable[[], None]] = {one.name: partial(run, one, base_model, folder) for one in RECIPES[who]}
    if who == "second":
        uses |= {
            "soft targets": partial(soft_targets, base_model, folder),
            "benchmark": partial(benchmark, base_model, folder),
        }
    for name, use in uses.items():
        try:
            use()
            outcomes[name] = ""
        except SystemExit as ended:
            outcomes[name] = "" if not ended.code else f"ended with {ended.code}"
        except Exception as error:  # noqa: BLE001 - the recipe's edge: the next one runs
            traceback.print_exc()
            outcomes[name] = f"{type(error).__name__}: {error}"
    return outcomes


if __name__ == "__main__":
    from sdk_end import end

    warnings.simplefilter("ignore")
    end(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
