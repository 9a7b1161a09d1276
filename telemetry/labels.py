"""Values of metric labels: few, and without tenants, paths or secrets.

The process and Prometheus keep a time series for every value of a label. Tenants come and go, so no label names one. Metrics
tell tenants apart by share only: operators tune shares, and fairness is promised between them.
"""

import math
import re
from hashlib import blake2b

_LEAST_SHARE, _GREATEST_SHARE = -4, 6
_POOL = re.compile(r"[A-Za-z0-9_.-]+/(?=vllm-|torch:)")
"""Pool prefix before a replica's own name."""


def share_class(share: float) -> str:
    """Return the power of two nearest to a tenant's share, from 1/16 to 64: eleven classes for any number of tenants."""
    exponent = round(math.log2(share)) if share > 0 else _LEAST_SHARE
    return f"{2.0 ** min(max(exponent, _LEAST_SHARE), _GREATEST_SHARE):g}"


def base_label(name: str) -> str:
    """Return the label of a base model. A name that is a path is cut to its last part and a short hash."""
    if not name.startswith(("/", ".", "~")):
        return name
    digest = blake2b(name.encode(), digest_size=3).hexdigest()
    return f"{name.rstrip('/').rpartition('/')[2]}-{digest}"


def replica_label(name: str, base_model: str) -> str:
    """Return the label of a replica: its name without the base model. Of a URL only host and port remain."""
    pool = _POOL.match(name)
    prefix = pool.group() if pool else ""
    own = name.removeprefix(prefix).removesuffix(f":{base_model}")
    return prefix + own.rpartition("@")[2].partition("/")[0]
