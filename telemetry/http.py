"""Metrics of HTTP requests, by route, method and status."""

from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class HttpMetrics:
    """HTTP metrics of one process. Label values are bounded: the app's route templates, known methods, statuses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("route", "method")
        self._requests = Counter(
            "weft_http_requests", "HTTP requests answered.", (*labels, "status"), registry=registry
        )
        self._seconds = Histogram(
            "weft_http_request_seconds",
            "Seconds from a request's first byte to its answer's last byte. Polls of retrieve_future are held on purpose.",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        # Labelled children are kept: finding one by its labels costs several times what counting does.
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def answered(self, route: str, method: str, status: int, *, started: float) -> None:
        """Count a request that began at ``perf_counter`` time ``started``. ``route`` is a route template, never a path."""
        key = (route, method, status)
        found = self._children.get(key)
        if found is None:
            shown = method if method in _METHODS else "other"
            found = self._requests.labels(route, shown, str(status)), self._seconds.labels(route, shown)
            if method in _METHODS:
                self._children[key] = found
        found[0].inc()
        found[1].observe(perf_counter() - started)
