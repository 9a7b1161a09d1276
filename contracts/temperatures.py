"""Temperatures of samples. Every sampler has the same bounds."""

_MOST = 2.0
"""Highest temperature: vLLM refuses more."""
_LEAST = 0.01
"""Lowest temperature above 0: vLLM draws with this one where a request has a lower one, and tells nobody."""
_ROUNDED = 1e-6
"""Relative error of a number that came in 32 bits, with room to spare."""
TEMPERATURES = f"0 (greedy), or a number from {_LEAST:g} to {_MOST:g}"
"""Allowed temperatures, as errors tell them."""


def is_drawn_with(temperature: float) -> bool:
    """Tell whether every sampler draws with this very temperature."""
    return temperature == 0 or _LEAST * (1 - _ROUNDED) <= temperature <= _MOST
