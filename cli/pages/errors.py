"""Page of every error class with its code and HTTP status, rendered from ``contracts.errors``."""

from collections.abc import Iterator

from cli.pages.markdown import GENERATED, prose, table
from contracts.errors import WeftError

_HEAD = f"""# Errors

{GENERATED.format(source="contracts/errors.py")}

Every error that weft raises on purpose is a `WeftError`. An HTTP answer carries `code`, `detail` and `retryable`. A failed
operation carries `category`. The mark `└` says: a kind of the class above.

The `tinker` SDK repeats a request upon 408, 409, 429 and 5xx, so no final answer uses them
([decision 2](../decisions/0002-final-errors-are-4xx.md)).

"""


def render() -> str:
    """Return the page."""
    rows = [
        (
            f"{'└ ' * depth}`{kind.__name__}`",
            f"`{kind.code}`",
            str(kind.status),
            "yes" if kind.retryable else "no",
            kind.category,
            prose(kind.__doc__ or ""),
        )
        for kind, depth in errors()
    ]
    return _HEAD + table(("class", "code", "status", "retryable", "category", "meaning"), rows)


def errors(root: type[WeftError] = WeftError, depth: int = 0) -> Iterator[tuple[type[WeftError], int]]:
    """Yield every class below ``root`` that the contracts declare, each with its depth, in the order of the file."""
    for kind in root.__subclasses__():
        if kind.__module__ == WeftError.__module__:
            yield kind, depth
            yield from errors(kind, depth + 1)
