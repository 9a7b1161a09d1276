"""Certificates of test servers, which clients trust that are given the file."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Certificate:
    """A self-signed certificate, and its key."""

    file: Path
    key: Path

    @classmethod
    def make(cls, folder: Path, host: str = "localhost") -> Self:
        """Make one of ``host``, valid for a day. Raises ``FileNotFoundError`` where ``openssl`` is not installed."""
        folder.mkdir(parents=True, exist_ok=True)
        made = cls(folder / "cert.pem", folder / "key.pem")
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
        ask = ("openssl", "req", "-x509", *curve, "-nodes", "-days", "1")
        name = ("-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}")
        subprocess.run([*ask, *name, "-out", made.file, "-keyout", made.key], check=True, capture_output=True)
        return made
