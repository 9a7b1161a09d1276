"""Writes the client without asyncio from the one with it: ``python clients/python/make_sync.py``."""

import re
from pathlib import Path

SOURCE = Path(__file__).parent / "src" / "weft_client" / "asynchronous.py"
TARGET = SOURCE.with_name("synchronous.py")
_HEAD = '"""The client without asyncio. ``clients/python/make_sync.py`` makes it of ``weft_client.asynchronous``."""'
_RULES = (
    (r"import asyncio\n", "import time\n"),
    (r"asyncio\.sleep", "time.sleep"),
    (r"async (def|with|for) ", r"\1 "),
    (r"await ", ""),
    (r"asynccontextmanager", "contextmanager"),
    (r"AsyncIterator", "Iterator"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"__aenter__", "__enter__"),
    (r"__aexit__", "__exit__"),
    (r"\.aclose\(", ".close("),
    (r"\.aread\(", ".read("),
    (r"\.aiter_lines\(", ".iter_lines("),
    (r"import Collection, Mapping, Iterator", "import Collection, Iterator, Mapping"),
    (r"import Iterator, Collection, Mapping", "import Collection, Iterator, Mapping"),
)


def synchronous(source: str) -> str:
    """Return the source without asyncio."""
    text = _HEAD + source[source.index('"""\n') + 3 :]
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return text


if __name__ == "__main__":
    TARGET.write_text(synchronous(SOURCE.read_text()))
