"""The SDK's log of why a sample and a model's creation wait, as JSON, once both reasons are there.

python -m tests.api.sdk_reasons BASE_URL API_KEY SAMPLER_PATH BASE_MODEL VERSION
"""

import logging
import sys
import threading
from importlib.metadata import version

import tinker
from tinker import types

from tests.e2e.sdk_end import end

SECONDS = 90.0


class Reasons(logging.Handler):
    """Keeps the logged reasons by what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.are_there = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line that has a reason."""
        text = record.getMessage()
        if "Reason: " in text:
            self.found["sample" if text.startswith("Sampling is paused") else "training"] = text
        if len(self.found) == 2:
            self.are_there.set()


def main(base_url: str, api_key: str, sampler_path: str, base_model: str, expected: str) -> None:
    """Send both, wait for the log, and leave."""
    assert version("tinker") == expected, tinker.__file__
    try:
        from tinker.lib import queue_state_logger
    except ImportError:
        pass
    else:
        # The newer SDK tells of training only after a quarter of an hour.
        queue_state_logger.PAUSE_GRACE_PERIOD = 0  # type: ignore[attr-defined,unused-ignore]
    reasons = Reasons()
    logging.getLogger("tinker").addHandler(reasons)
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    sampler = service.create_sampling_client(model_path=sampler_path)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    waiting = sampler.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=4))
    making = threading.Thread(
        target=lambda: service.create_lora_training_client(base_model=base_model, rank=4), daemon=True
    )
    making.start()
    assert reasons.are_there.wait(SECONDS), reasons.found
    assert not waiting.done()
    # Neither ends, and the SDK waits for them at a regular exit.
    end(reasons.found)


if __name__ == "__main__":
    main(*sys.argv[1:6])
