"""Metrics, traces, logs and readiness of a process."""
