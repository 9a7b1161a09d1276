"""Messages between a process that has a job and the process that does its work, in msgpack."""

from pathlib import Path

import msgspec

from contracts.operations import LoraSettings
from engine.model.adapter_import import ImportBounds
from engine.model.base_outline import BaseOutline, ModelNames


class MergeWork(msgspec.Struct, tag=True, frozen=True):
    """Merge of ``adapter`` into ``base``, written as ``directory`` with the data type ``dtype``, of ``room`` bytes at most.

    ``abandoned``: folder of the attempt before, of which files may be left.
    """

    base: Path
    names: ModelNames
    adapter: Path
    directory: Path
    abandoned: Path
    dtype: str | None
    room: int


class ImportWork(msgspec.Struct, tag=True, frozen=True):
    """Import of ``archive``, beside which it is unpacked, as the checkpoint ``directory``. ``abandoned``: see ``MergeWork``."""

    archive: Path
    directory: Path
    abandoned: Path
    base: BaseOutline
    bounds: ImportBounds


Work = MergeWork | ImportWork


class Ready(msgspec.Struct, tag=True, frozen=True):
    """First answer: the process can work."""


class Moved(msgspec.Struct, tag=True, frozen=True):
    """Progress of the work, in bytes."""

    done: int
    total: int


class Made(msgspec.Struct, tag=True, frozen=True):
    """The work is done: the checkpoint's size in bytes, and an imported adapter's settings."""

    size_bytes: int
    settings: LoraSettings | None = None


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The work cannot be done as asked: the message of an ``InvalidRequest``."""

    message: str


class Postponed(msgspec.Struct, tag=True, frozen=True):
    """The work cannot be done now: the message of an ``Unavailable``."""

    message: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The work failed in an unforeseen way: its traceback, for the log."""

    traceback: str


Answer = Ready | Moved | Made | Refused | Postponed | Failed
_ENCODER = msgspec.msgpack.Encoder(enc_hook=str)
_WORK = msgspec.msgpack.Decoder(Work, dec_hook=lambda kind, value: kind(value))
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def message_bytes(message: Work | Answer) -> bytes:
    """Return the message's bytes."""
    return _ENCODER.encode(message)


def read_work(body: bytes) -> Work:
    """Decode work. Raises ``msgspec.MsgspecError``."""
    found: Work = _WORK.decode(body)
    return found


def read_answer(body: bytes) -> Answer:
    """Decode an answer. Raises ``msgspec.MsgspecError``."""
    found: Answer = _ANSWERS.decode(body)
    return found
