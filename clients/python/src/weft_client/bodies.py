"""Bodies of requests that have several parts."""

from collections.abc import Collection
from typing import Any


def sample_body(
    sampler: str,
    prompt: list[int],
    *,
    seq_id: int,
    num_samples: int,
    max_tokens: int | None,
    temperature: float,
    seed: int | None,
    stop: list[int] | None,
) -> dict[str, Any]:
    """Return the body of a streamed sample in Tinker's form."""
    params = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "num_samples": num_samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        "sampling_params": {name: value for name, value in params.items() if value is not None},
    }


def webhook_state(
    url: str | None, events: Collection[str] | None, note: str | None, is_enabled: bool | None = None
) -> dict[str, Any]:
    """Return what is given of a webhook's state, as a request has it."""
    given = {"url": url, "events": None if events is None else [*events], "note": note, "is_enabled": is_enabled}
    return {name: value for name, value in given.items() if value is not None}
