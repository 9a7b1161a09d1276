"""weft's own wire, under ``/api/v1``: gates of adapters, staleness of samplers, reports on samples, streams of tokens."""
