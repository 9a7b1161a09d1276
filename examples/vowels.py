"""Task of the RL examples: draw a few tokens after a prompt. The reward is the share of vowels among them."""

from collections.abc import Sequence
from typing import Any

from tinker import types

from examples.data import policy_datum

LENGTH, GROUP = 16, 32
"""Tokens of a sample, and samples of a group: the group's mean reward is the baseline of each."""
ADAM = types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)


class VowelTask:
    """The task in the tokens of one base model."""

    def __init__(self, trainer: Any) -> None:
        tokenizer = trainer.get_tokenizer()
        self._prompt: list[int] = tokenizer.encode("Say something:")
        self._vowels = set(tokenizer.encode("aeiou"))

    def ask(self, sampler: Any, *, group: int = GROUP) -> Any:
        """Ask for a group of samples, and return the future of it."""
        params = types.SamplingParams(max_tokens=LENGTH, temperature=1.0, stop=[])
        return sampler.sample(types.ModelInput.from_ints(self._prompt), group, params)

    def reward(self, tokens: Sequence[int]) -> float:
        """Return the share of vowels, 0 to 1."""
        return sum(token in self._vowels for token in tokens) / LENGTH

    def learn(self, trainer: Any, groups: Sequence[Any], loss: str) -> float:
        """Make one step on the groups' samples, and return their mean reward. ``loss`` is the name of a policy loss."""
        data, rewards = [], []
        for group in groups:
            earned = [self.reward(sample.tokens) for sample in group.sequences]
            mean = sum(earned) / len(earned)
            for sample, reward in zip(group.sequences, earned, strict=True):
                data.append(policy_datum(self._prompt, sample, [reward - mean] * len(sample.tokens)))
            rewards += earned
        computed = trainer.forward_backward(data, loss)
        trainer.optim_step(ADAM).result()
        computed.result()
        return sum(rewards) / len(rewards)
