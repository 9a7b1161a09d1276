"""Makes a trainer as ``weft serve`` does, so that benchmarks can measure the trainer without the service."""

from engine.model.base import BaseModel
from engine.training.budgets import default_pass_token_budget
from engine.training.trainer import Trainer
from store.settings import Settings


def pass_tokens(base: BaseModel) -> int:
    """Return the tokens of one full pass of the service: the setting, or its default on the base's device."""
    return Settings().pass_token_budget or default_pass_token_budget(base)


def make_trainer(base: BaseModel) -> Trainer:
    """Return a trainer of ``base`` with the service's token budget."""
    return Trainer(base, pass_token_budget=pass_tokens(base))
