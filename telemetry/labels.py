"""What may stand in a metric's label: few values, no tenant, no path, no secret.

Every value of a label is a time series that the process keeps and Prometheus stores for ever. Tenants come and go, so they
are told apart by their share only: what operators tune, and what fairness promises something about.
"""

import math
import re
from hashlib import blake2b

_LEAST_SHARE, _GREATEST_SHARE = -4, 6
_POOL = re.compile(r"[A-Za-z0-9_.-]+/(?=vllm-|torch:)")
"""What stands before a replica's own name."""


def share_class(share: float) -> str:
    """The power of two next to a tenant's share, from 1/16 to 64: eleven classes however many tenants there are."""
    exponent = round(math.log2(share)) if share > 0 else _LEAST_SHARE
    return f"{2.0 ** min(max(exponent, _LEAST_SHARE), _GREATEST_SHARE):g}"


def base_label(name: str) -> str:
    """A base model's served name; of one that is named by its folder the last part, and what tells it from its likes."""
    if not name.startswith(("/", ".", "~")):
        return name
    digest = blake2b(name.encode(), digest_size=3).hexdigest()
    return f"{name.rstrip('/').rpartition('/')[2]}-{digest}"


def replica_label(name: str, base_model: str) -> str:
    """A replica's name without the base model, and without what a URL may have beside host and port."""
    pool = _POOL.match(name)
    prefix = pool.group() if pool else ""
    own = name.removeprefix(prefix).removesuffix(f":{base_model}")
    return prefix + own.rpartition("@")[2].partition("/")[0]
