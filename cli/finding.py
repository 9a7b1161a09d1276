"""A finding of ``weft doctor`` about one part of the service."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class Finding:
    """State of one part, and how to mend it when it is not well.

    ``advises``: a start will work, but the operator should read the text.
    """

    part: str
    is_well: bool
    text: str
    advises: bool = False

    @property
    def mark(self) -> str:
        """The word that begins the finding's line: ``ok``, ``note`` or ``FAIL``."""
        if not self.is_well:
            return "FAIL"
        return "note" if self.advises else "ok  "


class Findings(BaseModel):
    """Every finding of one examination."""

    model_config = ConfigDict(frozen=True)

    items: list[Finding]
