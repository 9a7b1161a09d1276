"""Options that every example has, and a training client made by them."""

import argparse
from typing import Any

import tinker


def parse_options(about: str | None, *, steps: int) -> argparse.Namespace:
    """Return the options of the command line. ``about`` is the example's docstring, ``steps`` its usual number."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", help="name of a served base; without it the first one that is served")
    parser.add_argument("--steps", type=int, default=steps, help="training steps (%(default)s)")
    return parser.parse_args()


def new_trainer(service: tinker.ServiceClient, options: argparse.Namespace) -> Any:
    """Return the training client of a new run on the base that ``options`` name."""
    base_model = options.base_model or _first_base()
    return service.create_lora_training_client(base_model=base_model, rank=8, seed=0).result()


def _first_base() -> str:
    served = tinker.RestClient().get_server_capabilities().result().supported_models
    return str(served[0].model_name)
