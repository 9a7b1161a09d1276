"""Lower case of every alphabet's letters, as PostgreSQL has it: SQLite's own ``lower`` knows ASCII's alone."""

from typing import Any


def know_every_letter(connection: Any) -> None:
    """Have ``lower`` in statements of this connection to SQLite, whatever its driver, change all letters."""
    connection.create_function("lower", 1, _lower, deterministic=True)


def _lower(text: Any) -> Any:
    return text.lower() if isinstance(text, str) else text
