"""A policy that learns from its own samples: a run, its live sampler, and the versions that it has published."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from bench.clients.weft_client import LearningRun, WeftClient, sample_body

PROMPT_TOKENS = 16
_WANTED = 4
"""A token earns 1 where its id is a multiple of this."""


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one request: tokens and logprobs of each sequence, and the number of the oldest version that drew a token."""

    sequences: list[tuple[list[int], list[float]]]
    oldest: int

    def rewards(self) -> list[float]:
        """Return each sequence's reward, 0 to 1: the share of its tokens that are wanted."""
        return [sum(token % _WANTED == 0 for token in tokens) / len(tokens) for tokens, _ in self.sequences]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Sizes of the groups of a batch: ``samples`` of each group, and the ``lengths`` of groups, in turn, in tokens."""

    samples: int
    lengths: tuple[int, ...]


class Policy:
    """A policy over a new run. Make it with ``create``. Raises ``RuntimeError`` for an answer that is no success."""

    def __init__(self, client: WeftClient, run: LearningRun, shape: GroupShape, *, learning_rate: float) -> None:
        self._client = client
        self._run = run
        self._shape = shape
        self._learning_rate = learning_rate
        self._sampler = ""
        self._asked = 0
        self._numbers: dict[str, int] = {}
        """Number of each version by its name, from 0."""
        self._prompt = list(range(1, PROMPT_TOKENS + 1))
        self.came = 0
        """Sequences that came back whole."""
        self.cuts = 0
        """Times that samples were cut and went on."""

    @classmethod
    async def create(
        cls, client: WeftClient, shape: GroupShape, *, base_model: str, vocabulary: int, learning_rate: float, seed: int
    ) -> Self:
        """Return a policy that has published its first version, number 0."""
        run = await LearningRun.create(client, base_model=base_model, vocabulary=vocabulary, seed=seed)
        policy = cls(client, run, shape, learning_rate=learning_rate)
        policy._sampler = await run.live_sampler()
        await policy.publish()
        return policy

    async def follow(self, swap_policy: str, *, max_lag: int) -> None:
        """Say what publications do to samples in flight. One that would be older than the bound fails."""
        bound = {"max_version_lag": max_lag, "on_stale": "fail", "swap_policy": swap_policy}
        await self._client.post(f"samplers/{self._sampler}/staleness", **bound)

    @property
    def version(self) -> int:
        """Number of the newest version."""
        return len(self._numbers) - 1

    @property
    def asked(self) -> int:
        """Sequences that were asked for."""
        return self._asked * self._shape.samples

    async def publish(self) -> None:
        """Publish the weights as they are. The live sampler and samples in flight go on with them."""
        promise = await self._run.submit("save_weights_for_sampler", path=f"v{len(self._numbers)}")
        path = (await self._client.result(promise))["path"]
        found = await self._client.post(f"adapters/{self._run.run}/reload", path=path)
        self._numbers[found["version"]] = len(self._numbers)

    async def draw(self) -> Group:
        """Ask for the next group, and return it once it is drawn."""
        number, self._asked = self._asked, self._asked + 1
        length = self._shape.lengths[number % len(self._shape.lengths)]
        body = sample_body(self._sampler, number, self._prompt, max_tokens=length, seed=number)
        promise = await self._client.post("asample", **(body | {"num_samples": self._shape.samples}))
        result = await self._client.result(promise)
        report = await self._client.get(f"samples/{promise['request_id']}")
        self.cuts += report["attempts"] - 1
        sequences = [(sequence["tokens"], sequence["logprobs"]) for sequence in result["sequences"]]
        self.came += sum(len(tokens) == len(logprobs) == length for tokens, logprobs in sequences)
        spans = [span for sequence in report["sequences"] for span in sequence["spans"]]
        return Group(sequences, min(self._numbers[span["version"]] for span in spans))

    async def learn(self, groups: Sequence[Group]) -> float:
        """Make one step on the groups, and return their mean reward. A group's mean is the baseline of its sequences."""
        data, rewards = [], []
        for group in groups:
            earned = group.rewards()
            mean = sum(earned) / len(earned)
            rewards += earned
            for (tokens, logprobs), reward in zip(group.sequences, earned, strict=True):
                data.append(self._datum(tokens, logprobs, reward - mean))
        lesson = {"data": data, "loss_fn": "cispo"}
        promises = [
            await self._run.submit("forward_backward", forward_backward_input=lesson),
            await self._run.submit(
                "optim_step", adam_params={"learning_rate": self._learning_rate, "grad_clip_norm": 1.0}
            ),
        ]
        await asyncio.gather(*map(self._client.result, promises))
        return sum(rewards) / len(rewards)

    def _datum(self, tokens: Sequence[int], logprobs: Sequence[float], advantage: float) -> dict[str, Any]:
        whole, before = [*self._prompt, *tokens], [0.0] * (PROMPT_TOKENS - 1)
        inputs: dict[str, tuple[Sequence[float], str]] = {
            "target_tokens": (whole[1:], "int64"),
            "logprobs": ([*before, *logprobs], "float32"),
            "advantages": (before + [advantage] * len(tokens), "float32"),
        }
        return {
            "model_input": {"chunks": [{"tokens": whole[:-1]}]},
            "loss_fn_inputs": {
                name: {"data": data, "dtype": dtype, "shape": [len(data)]} for name, (data, dtype) in inputs.items()
            },
        }
