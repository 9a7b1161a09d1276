"""Rows that tenants own, and the SQL on them: keys, sessions, runs, checkpoints, samplers, gates and usage."""
