"""The admin API: everything that an operator does, under ``/admin/v1`` on a listener of its own."""

ADMIN_PREFIX = "/admin/v1"
"""Prefix of every admin route."""
