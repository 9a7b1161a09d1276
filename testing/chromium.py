"""Debian's Chromium."""

import shutil


def chromium_path() -> str | None:
    """Return the path of a Chromium, None where there is none: of the one without windows, which computes less, where it is."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")
