"""Tinker's wire: the endpoints that the ``tinker`` SDK calls, under ``/api/v1``."""
