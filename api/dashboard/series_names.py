"""Names of a point's numbers, as every page tells them. Scripts have the same in ``static/curves.js``."""

from collections.abc import Mapping
from types import MappingProxyType

from tenants.curves import Series

SERIES_NAMES: Mapping[Series, str] = MappingProxyType(
    {
        Series.MEAN_LOSS: "Mean loss",
        Series.LEARNING_RATE: "Learning rate",
        Series.GRAD_NORM: "Gradient norm",
        Series.TOKENS: "Tokens",
        Series.SAMPLING_KL: "Sampler KL",
    }
)


def series_name(series: str) -> str:
    """Return the name of a series by its value."""
    return SERIES_NAMES[Series(series)]
