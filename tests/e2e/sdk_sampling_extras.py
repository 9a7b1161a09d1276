"""Results of a sample beside its tokens, through the public ``tinker`` SDK; run as a script, since the SDK keeps connections.

    python sdk_sampling_extras.py BASE_URL API_KEY OTHER_KEY BASE_MODEL

Prints one JSON line. Two tenants' adapters, trained apart, are asked the same at once.
"""

import sys

import tinker
import torch
from tinker import types

PROMPT = list(b"The cat says meow, and the dog says ")
OTHERS = 2
LIKELIEST = 100
"""Likeliest tokens that may be asked for, on every sampler."""
WORDS = (b"miau", b"wuff")


def trained(service: tinker.ServiceClient, base_model: str, word: bytes) -> tinker.SamplingClient:
    """Train an adapter on the prompt with a word after it, and sample from it."""
    trainer = service.create_lora_training_client(base_model=base_model, rank=4, seed=len(word))
    tokens = [*PROMPT, *word]
    inputs = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
        "weights": types.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32", shape=[len(tokens) - 1]),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    for _ in range(3):
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return trainer.save_weights_and_get_sampling_client()


def wanted() -> torch.Tensor:
    """Two tokens at some positions: the prompt's own and another one; at the others none."""
    ids = torch.full((len(PROMPT) - 1, OTHERS), -1, dtype=torch.int64)
    for row in (0, 7, len(PROMPT) - 2):
        ids[row] = torch.tensor([PROMPT[row + 1], 255 - PROMPT[row + 1]])
    return ids


def of_all() -> torch.Tensor:
    """The prompt's own token at each position."""
    return torch.tensor(PROMPT[1:], dtype=torch.int64)[:, None]


def seen_by(sampler: tinker.SamplingClient) -> dict[str, object]:
    """Ask one sampler for everything."""
    prompt, one = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=1, seed=1)
    dense, sparse = types.TensorData.from_torch(wanted()), types.TensorData.from_torch_sparse(wanted(), pad_value=-1)
    futures = [
        sampler.sample(prompt, 1, one, include_prompt_logprobs=True, target_prompt_logprobs=dense),
        sampler.sample(prompt, 1, one, target_prompt_logprobs=sparse),
        sampler.sample(prompt, 1, one, prompt_alt_tokens_k=3, include_prompt_logprobs=True, prompt_logprobs_last_n=2),
    ]
    likeliest = sampler.sample(prompt, 1, one, topk_sample_logprobs=LIKELIEST).result().sequences[0].topk_logprobs
    everywhere = sampler.sample(prompt, 1, one, target_prompt_logprobs=types.TensorData.from_torch(of_all())).result()
    changed = types.ModelInput.from_ints([*PROMPT[:-1], 255 - PROMPT[-1]])
    other = sampler.compute_logprobs(changed).result()[-1]
    full, listed, drawn = (future.result() for future in futures)
    alternatives = drawn.prompt_alt_tokens
    assert alternatives is not None
    checks = [
        types.ModelInput.from_ints([*PROMPT[:5], int(token)]) for token in alternatives.tokens.to_torch()[4].tolist()
    ]
    return {
        "own": [full.prompt_logprobs[row + 1] for row in (0, 7, len(PROMPT) - 2)],
        "other": other,
        "dense": full.target_prompt_logprobs.to_torch().tolist(),
        "sparse": listed.target_prompt_logprobs.to_torch().to_dense().tolist(),
        "likeliest": len(likeliest[0]),
        "all": everywhere.target_prompt_logprobs.to_torch().squeeze(1).tolist(),
        "all_own": sampler.compute_logprobs(prompt).result()[1:],
        "listed": len(listed.target_prompt_logprobs.data),
        "drawn": alternatives.logprobs.to_torch()[4].tolist(),
        "drawn_again": [sampler.compute_logprobs(one).result()[-1] for one in checks],
        "shape": list(alternatives.tokens.to_torch().shape),
        "scored": [index for index, value in enumerate(drawn.prompt_logprobs) if value is not None],
    }


def cached(sampler: tinker.SamplingClient, prompt: list[int]) -> int:
    """Return how many tokens of the prompt came from the prefix cache."""
    asked = types.ModelInput.from_ints(prompt)
    return int(sampler.sample(asked, 2, types.SamplingParams(max_tokens=2)).result().prompt_cache_hit_tokens)


def main(base_url: str, key: str, other_key: str, base_model: str) -> dict[str, object]:
    """Ask both tenants' samplers."""
    services = [tinker.ServiceClient(base_url=base_url, api_key=one) for one in (key, other_key)]
    ours, theirs = (trained(one, base_model, word) for one, word in zip(services, WORDS, strict=True))
    long = PROMPT * 20
    hits = [cached(ours, long), cached(ours, long), cached(theirs, long)]
    bare = [one.create_sampling_client(base_model=base_model) for one in services]
    hits += [cached(bare[0], long), cached(bare[0], long), cached(bare[1], long)]
    return {"ours": seen_by(ours), "theirs": seen_by(theirs), "hits": hits, "length": len(long)}


if __name__ == "__main__":
    from sdk_end import end

    end(main(*sys.argv[1:5]))
