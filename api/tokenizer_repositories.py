"""Repositories of the served base models' tokenizer and configuration files, as a Hugging Face client asks for them.

A file can be asked for only if it was found when the process started, by its exact name. So no path of a request ever reaches
the disk, and weights are in no repository.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from contracts.base_model import BaseModelFacts
from contracts.tokenizer_ids import is_repository_id, sdk_tokenizer_id

_PATTERNS = (
    "*config.json",
    "tokenizer.json",
    "tokenizer.model*",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "tiktoken.model",
    "tokenization_*.py",
    "configuration_*.py",
    "tool_declaration*.py",
)
"""Names of tokenizer and configuration files, relative to the model's folder."""
_LARGEST = 128 * 2**20
"""Bytes of the largest file that is offered. Tokenizers of 250,000 tokens take about 35 MB."""


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A file on disk. ``digest`` is the SHA-256 of its content, as hexadecimal."""

    path: Path
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class TokenizerRepository:
    """Files by their names, and the commit, 40 hexadecimal digits that stand for all of them."""

    commit: str
    files: Mapping[str, RepositoryFile]


def tokenizer_repositories(bases: Mapping[str, BaseModelFacts]) -> dict[str, TokenizerRepository]:
    """Return the repositories by id. Reads and digests the files, which takes some 30 ms for a large tokenizer.

    A base has its served name as id, and the id that the SDK makes from the name. If two bases have the same, the one with that
    very name wins, else the first in order.
    """
    by_base = {name: _read(facts.path) for name, facts in sorted(bases.items())}
    derived = {sdk_tokenizer_id(name): found for name, found in reversed(by_base.items())}
    return {id: found for id, found in (derived | by_base).items() if is_repository_id(id)}


def _read(folder: Path) -> TokenizerRepository:
    files = {}
    for path in sorted([*folder.glob("*"), *folder.glob("*/*.jinja")]):
        name = path.relative_to(folder).as_posix()
        if not any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in _PATTERNS):
            continue
        if path.is_file() and path.stat().st_size <= _LARGEST:
            content = path.read_bytes()
            files[name] = RepositoryFile(path, len(content), hashlib.sha256(content).hexdigest())
    told = "".join(f"{name} {file.digest}\n" for name, file in files.items())
    return TokenizerRepository(hashlib.sha256(told.encode()).hexdigest()[:40], files)
