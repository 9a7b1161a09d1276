"""Hundreds of samples of one sampler at once, half of them by a copy of its client, through the public ``tinker`` SDK.

    python sdk_many_samples.py BASE_URL API_KEY BASE_MODEL COUNT

The copy is made as another process gets one; SDKs before 0.14 have none. Prints the run whose adapter samples, sends the
samples after a line of input, and prints how many were drawn.
"""

import pickle
import sys

import tinker
from tinker import types


def main(base_url: str, api_key: str, base_model: str, count: str) -> None:
    """Make a sampler, wait for the word to go, sample."""
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    trainer = service.create_lora_training_client(base_model=base_model, rank=4, seed=1)
    sampler = trainer.save_weights_and_get_sampling_client()
    print(trainer.model_id, flush=True)
    sys.stdin.readline()
    params = types.SamplingParams(max_tokens=2, stop=[])
    prompt = types.ModelInput.from_ints(list(b"Hello"))
    has_copies = tuple(map(int, tinker.__version__.split(".")[:2])) >= (0, 14)
    clients = (sampler, pickle.loads(pickle.dumps(sampler)) if has_copies else sampler)
    futures = [
        clients[number % 2].sample(prompt, num_samples=1, sampling_params=params) for number in range(int(count))
    ]
    print(sum(len(future.result().sequences[0].tokens) == 2 for future in futures), flush=True)


if __name__ == "__main__":
    from sdk_end import end

    main(*sys.argv[1:5])
    end()
