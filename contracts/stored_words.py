"""Words of stored rows, read by a version that may be older than the one that wrote them.

Processes of two versions work on one database while an upgrade goes on. A word that only the newer one knows must not break the
older one's answer, least of all one that is about other tenants too.
"""

from enum import StrEnum
from typing import TypeVar

Word = TypeVar("Word", bound=StrEnum)
Other = TypeVar("Other")


def known(words: type[Word], text: str, otherwise: Other) -> Word | Other:
    """Return the word that ``text`` is, ``otherwise`` for one that only another version knows."""
    try:
        return words(text)
    except ValueError:
        return otherwise
