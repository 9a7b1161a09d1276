"""Unpacks released wheels into ``FOLDER/PACKAGE-VERSION``; tests put one first on a process's path.

    python .ci/sdks.py PIP_PYTHON FOLDER PACKAGE==VERSION...
    python .ci/sdks.py PIP_PYTHON FOLDER --every-minor

``--every-minor`` takes the newest release of each minor version of ``tinker`` from ``OLDEST`` on, and prints the versions, spaces
between. Versions that are unpacked already stay. Nothing of a package is run.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

OLDEST = (0, 6, 3)


def every_minor(python: str) -> list[str]:
    """Return the newest release of each minor version, the oldest first."""
    command = [python, "-m", "pip", "index", "versions", "tinker"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    released = re.search(r"^Available versions: (.*)$", told, re.MULTILINE)
    if released is None:
        sys.exit("pip lists no versions of tinker")
    newest: dict[tuple[int, ...], tuple[int, ...]] = {}
    for version in sorted(_numbers(text) for text in released[1].split(", ")):
        if version >= OLDEST:
            newest[version[:2]] = version
    return [".".join(map(str, version)) for version in newest.values()]


def unpack(python: str, folder: Path, package: str, version: str) -> None:
    """Download the wheel of a package's version and unpack it, unless that was done."""
    target = folder / f"{package}-{version}"
    if target.is_dir():
        return
    command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*command, f"{package}=={version}"], check=True)
    (wheel,) = folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")
    half = folder / f"{package}-{version}.part"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(half)
    half.rename(target)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main() -> None:
    """Unpack, and print the versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="whose pip is asked")
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*", help="PACKAGE==VERSION")
    parser.add_argument("--every-minor", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for named in options.packages:
        package, _, version = named.partition("==")
        unpack(options.python, options.folder, package, version)
    if options.every_minor:
        versions = every_minor(options.python)
        for version in versions:
            unpack(options.python, options.folder, "tinker", version)
        sys.stdout.write(" ".join(versions) + "\n")


if __name__ == "__main__":
    main()
