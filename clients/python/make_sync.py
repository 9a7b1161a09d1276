"""Writes the files of the client without asyncio from those with it: ``python clients/python/make_sync.py``."""

import re
from pathlib import Path

_PACKAGE = Path(__file__).parent / "src" / "weft_client"
_PARTS = ("sampling", "tenancy", "webhooks", "admin", "admin_work", "admin_webhooks", "transport")
FILES = {
    _PACKAGE / "asynchronous.py": _PACKAGE / "synchronous.py",
    **{_PACKAGE / f"{name}_async.py": _PACKAGE / f"{name}_sync.py" for name in _PARTS},
}
"""Each source with the file that is made of it."""
_HEADS = {
    "asynchronous": "The client without asyncio.",
    "sampling_async": "Gates, samples and operations without asyncio.",
    "tenancy_async": "Usage, audit log, keys and projects of a tenant, without asyncio.",
    "webhooks_async": "Webhooks of a tenant, without asyncio.",
    "admin_webhooks_async": "Webhooks of tenants for operators, without asyncio.",
    "admin_async": "The client of operators without asyncio.",
    "admin_work_async": "Runs, queues and processes for operators, without asyncio.",
    "transport_async": "The sender of calls without asyncio.",
}
_RULES = (
    (
        r"import AsyncIterator, Awaitable, Callable, Collection, Mapping",
        "import Callable, Collection, Iterator, Mapping",
    ),
    (r"import AsyncIterator, Collection, Mapping\n", "import Collection, Iterator, Mapping\n"),
    (r"import AsyncIterator, Collection\n", "import Collection, Iterator\n"),
    (r"Awaitable\[R\]", "R"),
    (r"from weft_client\.(\w+)_async", r"from weft_client.\1_sync"),
    (r"import asyncio\nimport builtins\n", "import builtins\nimport time\n"),
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


def synchronous(source: Path) -> str:
    """Return the source's text without asyncio."""
    made_of = f"``clients/python/make_sync.py`` makes this file of ``weft_client.{source.stem}``."
    text = source.read_text()
    text = text[text.index('"""\n') + 3 :]
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return f'"""{_HEADS[source.stem]}\n\n{made_of}\n"""' + text


if __name__ == "__main__":
    for source, target in FILES.items():
        target.write_text(synchronous(source))
