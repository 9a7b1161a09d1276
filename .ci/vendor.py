"""Write the dashboard's vendored scripts and styles anew: ``python .ci/vendor.py``. Needs npm; users of weft do not.

``vendor.toml`` pins each package by its version and each file by its digest. A new version gets its digests with ``--pin``.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = (ROOT / "api/dashboard/vendor.toml", ROOT / "tests/ui/vendor.toml")


def refresh(listed: Path, *, pin: bool) -> None:
    """Fetch the packages of a list and write their files. Raises ``SystemExit`` for another digest than the pinned one."""
    text = listed.read_text()
    for package in tomllib.loads(text)["package"]:
        with tempfile.TemporaryDirectory() as folder:
            name = f"{package['name']}@{package['version']}"
            subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                for file in package["files"]:
                    member = archive.extractfile(f"package/{file['from']}")
                    content = b"" if member is None else member.read()
                    digest = hashlib.sha512(content).hexdigest()
                    if digest != file["sha512"]:
                        if not pin:
                            sys.exit(
                                f"{name}: {file['from']} has the digest {digest}, which {listed.name} does not name"
                            )
                        text = text.replace(file["sha512"], digest)
                    (listed.parent / file["to"]).write_bytes(content)
    listed.write_text(text)


if __name__ == "__main__":
    for one in LISTS:
        refresh(one, pin="--pin" in sys.argv)
