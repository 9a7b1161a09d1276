"""The handshake with the in-process replica, and the trainer's forward against PEFT."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from contracts.base_model import read_base_model_facts
from contracts.errors import EngineFailure, FilesUnread, InvalidRequest
from engine.model.base import BaseModel
from engine.sampling.in_process.replica import TorchReplica
from engine.sampling.replica import AdapterVersion, Draws, PromptScoring
from tests.engine.sampling.drawing import GREEDY, Client
from tests.engine.sampling.handshakes import handshake, shake_hands
from workers.base_forward import BaseForward
from workers.sampling.forward_process import ForwardProcess, Patience

PROMPT = [72, 101, 108, 108, 111, 7]
EXACT = 1e-5


async def test_a_sound_replica_passes_beside_a_running_sample(world: Any, tmp_path: Path) -> None:
    replica = TorchReplica(world.base)
    await replica.start()
    try:
        async with handshake(world, tmp_path) as made:
            neighbour = Client(replica).start(PROMPT, world.cat, GREEDY)
            await shake_hands(replica, made)
            ids = (await neighbour.end()).only.ids
        assert ids == world.cat.greedy(PROMPT, len(ids))
        assert not any(name.startswith("weft:handshake") for name in (await replica.health()).adapters)
    finally:
        await replica.close()


async def test_a_disk_that_takes_no_adapters_is_told_and_the_neighbours_forward_goes_on(
    world: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    forward = BaseForward(world.base)
    try:
        with pytest.raises(EngineFailure, match="adapters of a handshake cannot be written: Not a directory"):
            await forward.handshake_adapters(tmp_path / "file", rank=2, with_head=False)
        scores = await forward.score(None, np.array(PROMPT), PromptScoring(1, True, 0))
        assert scores.logprobs is not None
    finally:
        await forward.close()


@pytest.mark.parametrize(
    ("module", "named"), [("model.layers.2.mlp.down_proj", "down_proj is off"), ("lm_head", "lm_head is off")]
)
async def test_an_adapter_that_is_not_applied_is_named(world: Any, tmp_path: Path, module: str, named: str) -> None:
    """The replica's reader drops the adapter's matrices on one projection, as vLLM drops those that it was not started for."""
    replica = TorchReplica(world.base)
    read = replica._read

    def misread(version: AdapterVersion) -> Any:
        weights = read(version)
        if module in weights.tensors:
            weights.tensors[module].b.zero_()
        return weights

    replica._adapters._read = misread
    await replica.start()
    try:
        async with handshake(world, tmp_path) as made:
            with pytest.raises(EngineFailure, match=named):
                await shake_hands(replica, made)
    finally:
        await replica.close()


async def test_another_base_is_named(world: Any, tmp_path: Path) -> None:
    head = world.base.model.get_output_embeddings().weight
    replica = TorchReplica(world.base)
    await replica.start()
    try:
        async with handshake(world, tmp_path) as made:
            adapters = await made.prepare()
            whole, before = made._forward.score, head.detach().clone()  # type: ignore[attr-defined]

            async def of_other_weights(*asked: Any, **how: Any) -> Any:
                with torch.no_grad():
                    head.mul_(1.02)
                try:
                    return await whole(*asked, **how)
                finally:
                    with torch.no_grad():
                        head.copy_(before)

            made._forward.score = of_other_weights  # type: ignore[method-assign]
            with pytest.raises(EngineFailure, match="the base model itself is off"):
                await made.run(replica, adapters)
    finally:
        await replica.close()


_SIZES = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128}
OTHERS: dict[str, PretrainedConfig] = {
    "transposed projections": GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "flattened rows": OPTConfig(**_SIZES, ffn_dim=96, max_position_embeddings=128, word_embed_proj_dim=64, dropout=0.0),
    "capped logits": Gemma2Config(**_GROUPED, head_dim=16, final_logit_softcapping=5.0, sliding_window=16),
    "tied embeddings": Qwen2Config(**_GROUPED, tie_word_embeddings=True),
    "experts, all routed": Qwen3MoeConfig(
        **_GROUPED, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
    "experts": Qwen2MoeConfig(
        **_GROUPED, moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=4, num_experts_per_tok=2
    ),
}


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
async def test_other_architectures_pass(config: PretrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path / "model")
    base = BaseModel.load(read_base_model_facts("other", tmp_path / "model", None), device="cpu")
    replica = TorchReplica(base)
    await replica.start()
    try:
        async with handshake(SimpleNamespace(base=base), tmp_path / "handshakes") as made:
            await shake_hands(replica, made)
    finally:
        await replica.close()


@dataclass(frozen=True)
class Forwards:
    """The forward in this process and in one of its own, where several requests wait for each other."""

    here: BaseForward
    there: ForwardProcess


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forwards(world: Any) -> AsyncIterator[Forwards]:
    """Both forwards, started once for the tests that leave them running."""
    made = Forwards(BaseForward(world.base), ForwardProcess(world.base.facts, dtype="float32"))
    yield made
    await made.here.close()
    await made.there.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("topk", [0, 3])
async def test_the_forward_scores_as_peft_does(world: Any, forwards: Forwards, topk: int) -> None:
    scoring = PromptScoring(start=2, logprobs=True, topk=topk)
    prompt = np.array(PROMPT)
    for forward in (forwards.here, forwards.there):
        found = await asyncio.gather(*(forward.score(who.version, prompt, scoring) for who in world.everyone))
        for scores, who in zip(found, world.everyone, strict=True):
            table = who.logprobs([], PROMPT)
            assert scores.logprobs is not None
            assert np.isnan(scores.logprobs[:2]).all()
            np.testing.assert_allclose(scores.logprobs[2:], who.of_tokens(PROMPT[:2], PROMPT[2:]), atol=EXACT)
            if topk:
                assert scores.topk is not None
                best = -np.sort(-table[2:], axis=1)[:, :topk]
                np.testing.assert_allclose(scores.topk.logprobs[2:], best, atol=EXACT)
            else:
                assert scores.topk is None


@pytest.mark.asyncio(loop_scope="module")
async def test_the_forward_scores_and_draws_at_a_prompts_positions(world: Any, forwards: Forwards) -> None:
    """Equal seeds draw the same in this process and in one of its own; each tenant's numbers are its own adapter's."""
    cells = (np.array([1, 1, 3]), np.array([0, 255, 108]))
    scoring, prompt = PromptScoring(2, True, 0, cells, alternatives=4), np.array(PROMPT)
    drawn = list[Any]()
    for forward in (forwards.here, forwards.there):
        asked = (forward.score(who.version, prompt, scoring, Draws(2.0, seed=5)) for who in (world.cat, world.dog))
        for scores, who in zip(await asyncio.gather(*asked), (world.cat, world.dog), strict=True):
            table, found = who.logprobs([], PROMPT), scores.alternatives
            assert scores.targets is not None
            assert found is not None
            np.testing.assert_allclose(scores.targets, table[cells], atol=EXACT)
            np.testing.assert_allclose(found.logprobs, np.take_along_axis(table[1:], found.tokens, 1), atol=EXACT)
            drawn.append(found.tokens.tolist())
    cold = await forwards.here.score(world.cat.version, prompt, scoring, Draws(0.0))
    assert drawn[:2] == drawn[2:]
    assert cold.alternatives is not None
    assert (cold.alternatives.tokens == world.cat.logprobs([], PROMPT)[1:].argmax(1)[:, None]).all()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_forwards_process_refuses_what_cannot_be_computed_and_goes_on(
    world: Any, forwards: Forwards, tmp_path: Path
) -> None:
    scoring, prompt = PromptScoring(1, logprobs=True, topk=0), np.array(PROMPT)
    missing, theirs = await asyncio.gather(
        *(forwards.there.score(one, prompt, scoring) for one in (AdapterVersion("none", tmp_path / "none"), None)),
        return_exceptions=True,
    )
    assert isinstance(missing, InvalidRequest)
    assert "missing or damaged" in missing.message
    assert not isinstance(theirs, BaseException)
    assert theirs.logprobs is not None
    np.testing.assert_allclose(theirs.logprobs[1:], world.bare.of_tokens(PROMPT[:1], PROMPT[1:]), atol=EXACT)


async def test_prompts_that_wait_are_scored_together_and_fail_alone(world: Any, tmp_path: Path) -> None:
    scoring, forward = PromptScoring(1, logprobs=True, topk=0), BaseForward(world.base)
    passes, run_pass = [], forward._trainer.run_pass

    def counted(items: Any) -> Any:
        passes.append(len(items))
        return run_pass(items)

    forward._trainer.run_pass = counted  # type: ignore[method-assign]
    prompts = [PROMPT[: 2 + number % 4] for number in range(12)]
    missing = AdapterVersion("none", tmp_path / "none")
    try:
        found = await asyncio.gather(
            *(forward.score(who.version, np.array(prompt), scoring) for prompt in prompts for who in world.everyone),
            forward.score(missing, np.array(PROMPT), scoring),
            return_exceptions=True,
        )
    finally:
        await forward.close()
    assert isinstance(found.pop(), InvalidRequest)
    assert sum(passes) == len(found) == 36
    assert len(passes) <= 3
    asked = [(prompt, who) for prompt in prompts for who in world.everyone]
    for scores, (prompt, who) in zip(found, asked, strict=True):
        assert not isinstance(scores, BaseException)
        assert scores.logprobs is not None
        np.testing.assert_allclose(scores.logprobs[1:], who.of_tokens(prompt[:1], prompt[1:]), atol=EXACT)


async def ended(pid: int | None) -> None:
    """Wait until a process has ended; None: it was not there any more."""
    try:
        handle = os.pidfd_open(pid or -1)
    except OSError:
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, gone.set)
    try:
        async with asyncio.timeout(60):
            await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def asked_of(forward: ForwardProcess, count: int) -> None:
    """Wait until ``count`` requests wait for the process."""
    async with asyncio.timeout(60):
        # A forward does not tell who waits for it. Each look gives those who ask a turn of the loop.
        while len(forward._waiting._others) < count or forward.pid is None:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_score_of_an_adapter_whose_folder_is_away_is_tried_again(
    world: Any, forwards: Forwards, tmp_path: Path
) -> None:
    """A neighbour's prompt is scored meanwhile."""
    scoring, prompt = PromptScoring(1, logprobs=True, topk=0), np.array(PROMPT)
    folder = tmp_path / "checkpoints" / "one"
    shutil.copytree(world.cat.version.directory, folder)
    version, away = AdapterVersion("one", folder), folder.parent.rename(tmp_path / "away")
    for forward in (forwards.here, forwards.there):
        ours, theirs = await asyncio.gather(
            forward.score(version, prompt, scoring),
            forward.score(world.dog.version, prompt, scoring),
            return_exceptions=True,
        )
        assert type(ours) is FilesUnread
        assert not isinstance(theirs, BaseException)
    away.rename(folder.parent)
    for forward in (forwards.here, forwards.there):
        found = await forward.score(version, prompt, scoring)
        assert found.logprobs is not None
        np.testing.assert_allclose(found.logprobs[1:], world.cat.of_tokens(PROMPT[:1], PROMPT[1:]), atol=EXACT)


async def test_a_hung_forward_is_ended_and_started_again(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The request that it has fails in a stated time; a neighbour's that waited is answered by another process."""
    scoring, prompt = PromptScoring(1, logprobs=True, topk=0), np.array(PROMPT)
    forward = ForwardProcess(world.base.facts, dtype="float32", patience=Patience(answer=0.5))
    try:
        await forward.score(None, prompt, scoring)
        hung = forward.pid
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)
        ours, theirs = await asyncio.gather(
            *(forward.score(who.version, prompt, scoring) for who in (world.cat, world.dog)), return_exceptions=True
        )
        assert forward.pid not in (None, hung)
    finally:
        await forward.close()
    assert isinstance(ours, EngineFailure)
    assert "did not answer in 1 s; it was ended" in ours.message
    assert "was ended pid=" in caplog.text
    assert not isinstance(theirs, BaseException)
    assert theirs.logprobs is not None
    np.testing.assert_allclose(theirs.logprobs[1:], world.dog.of_tokens(PROMPT[:1], PROMPT[1:]), atol=EXACT)


async def test_a_handshake_is_first_and_the_forwards_process_ends_after_it_and_starts_again(world: Any) -> None:
    """The process is kept while a handshake holds it, and gives its memory back when it is idle.

    A neighbour's prompts that wait are scored after the handshake, and not at all once they are left.
    """
    scoring, prompt = PromptScoring(1, logprobs=True, topk=0), np.array(PROMPT)
    forward, done = ForwardProcess(world.base.facts, dtype="float32", patience=Patience(idle=0.0)), list[str]()
    sent, exchange = list[Any](), forward._exchange

    async def noted(process: Any, request: Any) -> Any:
        sent.append(request)
        return await exchange(process, request)

    async def score(name: str, who: Any, *, first: bool = False) -> None:
        await forward.score(who.version, prompt, scoring, first=first)
        done.append(name)

    forward._exchange = noted  # type: ignore[method-assign]
    try:
        with forward.held():
            begun = asyncio.create_task(score("begun", world.cat))
            await asyncio.sleep(0)
            waiting = [asyncio.create_task(score("neighbour", world.dog)) for _ in range(2)]
            await asked_of(forward, 2)
            waiting.pop().cancel()
            await asyncio.gather(begun, *waiting, score("handshake", world.bare, first=True))
            assert done == ["begun", "handshake", "neighbour"]
            assert len(sent) == 3
            kept = forward.pid
            await score("again", world.cat)
            assert forward.pid == kept
        await ended(kept)
        assert forward.pid is None
        later = await forward.score(None, prompt, scoring)
        assert later.logprobs is not None
        np.testing.assert_allclose(later.logprobs[1:], world.bare.of_tokens(PROMPT[:1], PROMPT[1:]), atol=EXACT)
    finally:
        await forward.close()
    assert forward.pid is None
