"""Samples through the public ``tinker`` SDK beside the browser; run as a script, since the SDK keeps connections open.

    python -m tests.ui.sdk_sample BASE_URL API_KEY PATH PROMPT MAX_TOKENS COUNT

Prints ``begun`` once the samples are accepted, then one JSON line with the tokens of each.
"""

import sys

import tinker
from tinker import types

from tests.e2e.sdk_end import end

SECONDS = 200


def main(url: str, key: str, path: str, prompt: str, max_tokens: int, count: int) -> list[list[int]]:
    """Draw greedy samples one after the other."""
    sampler = tinker.ServiceClient(base_url=url, api_key=key).create_sampling_client(model_path=path)
    params = types.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    promises = [
        sampler.sample(types.ModelInput.from_ints([ord(one) for one in prompt]), 1, params) for _ in range(count)
    ]
    print("begun", flush=True)
    return [[int(one) for one in promise.result(timeout=SECONDS).sequences[0].tokens] for promise in promises]


if __name__ == "__main__":
    url, key, path, prompt, most, count = sys.argv[1:7]
    end(main(url, key, path, prompt, int(most), int(count)))
