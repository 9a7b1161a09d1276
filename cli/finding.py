"""What ``weft doctor`` says of one part."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """How one part is, and what to do when it is not well.

    ``advises``: a start will work, yet somebody should read this.
    """

    part: str
    is_well: bool
    text: str
    advises: bool = False

    @property
    def mark(self) -> str:
        """The word at the line's begin."""
        if not self.is_well:
            return "FAIL"
        return "note" if self.advises else "ok  "
