"""The trainer's forward over a base model in this process: ``TrainerForward`` with torch."""

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from contracts.errors import EngineFailure, WeftError
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import Datum, ForwardBackwardOutput, LoraSettings, LossSpec, TrainingBatch
from engine.model.adapter_folder import WEIGHTS, read_lora_weights, write_adapter_files
from engine.model.atomic_folder import write_atomically
from engine.model.base import BaseModel
from engine.model.device import DeviceFailed, device_errors
from engine.model.lora import AdapterSegment, LoraLayout, LoraWeights, bare_weights
from engine.sampling.engine_failure import as_weft_error
from engine.sampling.forward_queue import Asked, ForwardQueue
from engine.sampling.in_process.prompt_scores import PromptScores
from engine.sampling.replica import UNSCALED, AdapterVersion, Draws, PromptScored, PromptScoring
from engine.sampling.trainer_forward import HandshakeAdapter, HandshakeAdapters
from engine.training.adapter_state import AdapterState
from engine.training.target_logprobs import CHUNK_LOGITS
from engine.training.trainer import PassItem, Trainer

_SEED = 20
_STRENGTH = 0.5
"""Size of the random adapters' low-rank part, as a multiple of the projection's own output for random inputs."""
_HELD_ADAPTERS = 8
"""Adapters in memory, and most adapters of prompts that are scored together."""
MOST_TOKENS, MOST_PROMPTS = 4096, 64
"""Most tokens and prompts that are scored together; a longer prompt is scored alone."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to score, int64 (P,), under an adapter; None is the bare base."""

    adapter: AdapterVersion | None
    tokens: NDArray[np.int64]
    scoring: PromptScoring
    draws: Draws = UNSCALED

    @property
    def needs_logits(self) -> bool:
        """True if more is asked for than the log-probabilities of the prompt's own tokens."""
        scoring = self.scoring
        return scoring.topk > 0 or scoring.cells(len(self.tokens)) > 0 or not scoring.logprobs or len(self.tokens) < 2


class BaseForward:
    """``TrainerForward`` over ``base``. Prompts that wait are scored together, on one thread, beside the trainer's passes.

    On an accelerator their micro-batches take turns with those of the passes: a score adds nothing to a pass's memory.
    """

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._trainer = Trainer(base)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._held: OrderedDict[Path, LoraWeights] = OrderedDict()
        self._waiting: ForwardQueue[Prompt, PromptScored] = ForwardQueue()
        self._scoring: asyncio.Task[None] | None = None
        self._device_failure: DeviceFailed | None = None

    async def score(
        self,
        adapter: AdapterVersion | None,
        prompt: NDArray[np.int64],
        scoring: PromptScoring,
        draws: Draws = UNSCALED,
        *,
        first: bool = False,
    ) -> PromptScored:
        """See ``TrainerForward.score``."""
        found = self._waiting.put(Prompt(adapter, prompt, scoring, draws), first=first)
        if self._scoring is None or self._scoring.done():
            self._scoring = asyncio.create_task(self._score_waiting())
        return await found

    async def handshake_adapters(self, folder: Path, *, rank: int, with_head: bool) -> HandshakeAdapters:
        """See ``TrainerForward.handshake_adapters``."""
        return await self._on_thread(partial(self.adapters_now, folder, rank, with_head=with_head))

    def held(self) -> AbstractContextManager[None]:
        """See ``TrainerForward.held``. The base is in memory anyway."""
        return nullcontext()

    def check(self) -> None:
        """See ``TrainerForward.check``."""
        if self._device_failure is not None:
            raise self._device_failure

    async def close(self) -> None:
        """See ``TrainerForward.close``. Waits for the forward in hand."""
        self._waiting.fail(EngineFailure("the sampler was closed before the prompt was scored"))
        await asyncio.to_thread(self._thread.shutdown)

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _score_waiting(self) -> None:
        while taken := self._taken():
            outcomes: Sequence[PromptScored | WeftError]
            try:
                outcomes = await self._on_thread(partial(self.score_together, [asked.question for asked in taken]))
            except DeviceFailed as failure:
                self._device_failure = failure
                outcomes = [as_weft_error(failure, "scoring")] * len(taken)
            except Exception as error:  # noqa: BLE001 - the task's edge: every prompt that waits must get an answer
                outcomes = [as_weft_error(error, "scoring")] * len(taken)
            for asked, outcome in zip(taken, outcomes, strict=True):
                asked.end(outcome)

    def _taken(self) -> list[Asked[Prompt, PromptScored]]:
        """Take the next prompts that are scored together."""
        taken: list[Asked[Prompt, PromptScored]] = []
        tokens, adapters = 0, set[AdapterVersion | None]()
        while (asked := self._waiting.next()) is not None and len(taken) < MOST_PROMPTS:
            tokens += len(asked.question.tokens)
            adapters.add(asked.question.adapter)
            if taken and (tokens > MOST_TOKENS or len(adapters) > _HELD_ADAPTERS):
                break
            self._waiting.take()
            taken.append(asked)
        return taken

    def score_now(self, prompt: Prompt) -> PromptScored:
        """Score one prompt in this thread. Raises as ``score`` does, and ``DeviceFailed``."""
        (outcome,) = self.score_together([prompt])
        if isinstance(outcome, WeftError):
            raise outcome
        return outcome

    def score_together(self, prompts: Sequence[Prompt]) -> list[PromptScored | WeftError]:
        """Score the prompts in this thread and return their outcomes in order. One that fails fails alone.

        Raises ``DeviceFailed``.
        """
        outcomes: dict[int, PromptScored | WeftError] = {}
        items: dict[int, PassItem] = {}
        with device_errors():
            for number, prompt in enumerate(prompts):
                try:
                    with device_errors():
                        weights = self._weights(prompt.adapter)
                        if prompt.needs_logits:
                            outcomes[number] = self._by_logits(weights, prompt)
                        else:
                            items[number] = self._item(weights, prompt)
                except (WeftError, RuntimeError, MemoryError) as error:
                    outcomes[number] = as_weft_error(error, "scoring")
            for number, outcome in zip(items, self._trainer.run_pass(list(items.values())), strict=True):
                outcomes[number] = outcome if isinstance(outcome, WeftError) else _scored(prompts[number], outcome)
            for run in self._trainer.runs():
                self._trainer.unload(run)
        return [outcomes[number] for number in range(len(prompts))]

    def _item(self, weights: LoraWeights, prompt: Prompt) -> PassItem:
        """Return the forward of a training pass that gives the prompt's log-probabilities."""
        run = RunId("" if prompt.adapter is None else str(prompt.adapter.directory))
        self._trainer.put(run, AdapterState(weights))
        datum = Datum(prompt.tokens[:-1], prompt.tokens[1:], {})
        return PassItem(run, TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [datum]), backward=False)

    def adapters_now(self, folder: Path, rank: int, *, with_head: bool) -> HandshakeAdapters:
        """Do what ``handshake_adapters`` does, in this thread. Raises ``EngineFailure`` where the disk takes no adapters."""
        base = self._base
        names = [name for name, one in base.projections.items() if with_head or one.group != "unembed"]
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
        chosen = {"": names} | {kind: [name for name in names if name.rpartition(".")[2] == kind] for kind in kinds}
        try:
            adapters = [
                HandshakeAdapter(kind, _written(base, folder, kind or "all", _random_weights(base, rank, of_kind)))
                for kind, of_kind in chosen.items()
            ]
        except OSError as error:
            raise EngineFailure(f"the adapters of a handshake cannot be written: {error.strerror}") from error
        return HandshakeAdapters(str(base.dtype).removeprefix("torch."), adapters)

    @torch.inference_mode()
    def _by_logits(self, weights: LoraWeights, prompt: Prompt) -> PromptScored:
        """Return the scores with likeliest tokens, targets and draws, whose logits a training pass does not keep."""
        draws = prompt.draws
        scores = PromptScores(prompt.tokens, prompt.scoring, temperature=draws.temperature, seed=draws.seed)
        base = self._base
        ids = torch.from_numpy(prompt.tokens.copy())[None].to(base.device)
        with base.turns.turn(), base.adapters([AdapterSegment(weights, 0, 1)]):
            states = base.hidden_states(ids) if base.has_plain_head else base.logits(ids)
            size = max(1, CHUNK_LOGITS // base.facts.vocabulary_size)
            for first, part in enumerate(torch.split(states, size, dim=1)):
                logits = base.head(part) if base.has_plain_head else part
                scores.add(logits[0], first * size + 1)
        return scores.result

    def _weights(self, adapter: AdapterVersion | None) -> LoraWeights:
        """Return the adapter of a version, which never changes; the last ones are kept."""
        if adapter is None:
            return bare_weights(self._base.device)
        weights = self._held.pop(adapter.directory, None) or read_lora_weights(adapter.directory, self._base)
        self._held[adapter.directory] = weights
        if len(self._held) > _HELD_ADAPTERS:
            self._held.popitem(last=False)
        return weights


def _scored(prompt: Prompt, output: ForwardBackwardOutput) -> PromptScored:
    """Return the scores of a training pass: NaN before the first position that is scored."""
    found = np.concatenate([[np.nan], output.logprobs[0]]).astype(np.float32)
    found[: prompt.scoring.start] = np.nan
    return PromptScored(found, None)


def _random_weights(base: BaseModel, rank: int, names: list[str]) -> LoraWeights:
    """Return weights whose low-rank part is ``_STRENGTH`` times as large as what each projection itself adds.

    For an input of size s in each feature, A gives s / sqrt(3) (its entries are uniform within 1 / sqrt(in)), so B's entries
    are drawn with the standard deviation that makes up for it.
    """
    projections = {name: base.projections[name] for name in names}
    groups = {projection.group for projection in projections.values()}
    settings = LoraSettings(
        rank,
        seed=_SEED,
        train_attn="attn" in groups,
        train_mlp="mlp" in groups,
        train_unembed="unembed" in groups,
    )
    layout = LoraLayout(rank, projections)
    weights = LoraWeights.initialise(settings, layout, torch.device("cpu"))
    generator = torch.Generator().manual_seed(_SEED)
    modules = dict(base.model.named_modules())
    for name, pair in weights.tensors.items():
        spread = float(modules[name].weight.detach().float().std())
        size = _STRENGTH * spread * math.sqrt(3 * projections[name].in_features / rank) / weights.scaling
        pair.b.normal_(0.0, size, generator=generator)
    return weights


def _written(base: BaseModel, folder: Path, name: str, weights: LoraWeights) -> AdapterVersion:
    """Write the adapter to a folder named by its content, unless it is there."""
    digest = hashlib.sha256(weights.vector.numpy().tobytes()).hexdigest()[:12]
    directory = folder / f"{name}-{digest}"
    if not (directory / WEIGHTS).is_file():
        try:
            write_atomically(directory, lambda staging: write_adapter_files(staging, base, weights))
        except OSError:
            # Another process may have written the same bytes meanwhile.
            if not (directory / WEIGHTS).is_file():
                raise
    return AdapterVersion(f"weft:handshake:{directory.name}", directory)
