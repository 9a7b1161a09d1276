"""Log formats: text for people, or one JSON object a line. Both carry the ids of the current work, and mask secrets."""

import logging
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TextIO

import orjson

from contracts.secrets import mask_secrets
from telemetry.context import WorkContext, current_work

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
MOST_FRAMES = 64
"""Frames of an exception's traceback that are logged, the innermost."""
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class _ShortTracebacks(logging.Formatter):
    """Formatter of tracebacks by their last frames: a function that calls itself leaves a thousand."""

    def formatException(self, ei: _ExcInfo) -> str:
        """Return the traceback of an exception and of those before it."""
        return "".join(traceback.format_exception(*ei, limit=-MOST_FRAMES)).removesuffix("\n")


class TextFormatter(_ShortTracebacks):
    """Formats a record as a line of text with the ids at its end."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the formatted record."""
        shown = "".join(f" {name}={value}" for name, value in _ids(current_work()).items())
        return super().formatMessage(record) + shown

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record with its traceback, secrets masked."""
        return mask_secrets(super().format(record))


class JsonFormatter(_ShortTracebacks):
    """Formats a record as a JSON object: time, level, logger, message, process, and trace_id, tenant, operation if known."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
            **_ids(current_work()),
        }
        security = getattr(record, "security", None)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        # Text may hold characters that UTF-8 cannot encode, such as file names of another encoding.
        shown: dict[str, object] = {name: _encodable(mask_secrets(value)) for name, value in line.items()}
        if security is not None:
            shown["security"] = {name: _encodable(mask_secrets(str(value))) for name, value in security.items()}
        return orjson.dumps(shown).decode()


def configure_logging(
    level: str, log_format: Literal["text", "json"], process: str, stream: TextIO = sys.stderr
) -> None:
    """Send this process's logs from ``level`` up to ``stream``. Call it once, where the process is composed."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _ids(work: WorkContext) -> dict[str, str]:
    named = {"trace_id": work.trace_id, "tenant": work.tenant, "operation": work.operation}
    return {name: value for name, value in named.items() if value is not None}


def _encodable(value: str) -> str:
    return value.encode(errors="replace").decode()
