"""A client that abandons a sample through the public ``tinker`` SDK, and stays.

    python sdk_cancelling.py BASE_URL API_KEY BASE_MODEL TOKENS

Prints whether the future was cancelled, then waits for its input to end: the SDK tells the service in the background.
"""

import sys

import tinker
from tinker import types

PROMPT = types.ModelInput.from_ints(list(b"Hello"))


def main(base_url: str, api_key: str, base_model: str, tokens: str) -> None:
    """One long sample, abandoned while it is drawn."""
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    sampler = service.create_sampling_client(base_model=base_model)
    long = types.SamplingParams(max_tokens=int(tokens), stop=[], seed=1)
    abandoned = sampler.sample(PROMPT, num_samples=1, sampling_params=long)
    # Sent later and done: the long one has been accepted, and is polled.
    for seed in range(3):
        sampler.sample(PROMPT, num_samples=1, sampling_params=types.SamplingParams(max_tokens=2, seed=seed)).result()
    print(abandoned.cancel(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    from sdk_end import end

    main(*sys.argv[1:5])
    end()
