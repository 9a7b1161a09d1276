"""Words of a number."""


def noun(value: int, one: str, more: str | None = None) -> str:
    """Return the word for so many: ``one`` for a single one, else ``more``, by default ``one`` with an s."""
    return one if value == 1 else more or f"{one}s"


def counted(value: int, one: str, more: str | None = None) -> str:
    """Return the number and the word for so many, as ``noun`` chooses it."""
    return f"{value} {noun(value, one, more)}"
