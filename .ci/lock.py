"""Writes requirements.lock: every dependency of the image but torch, with the hashes of all its files. Needs uv."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_HEAD = """# Every dependency of the image but torch, with the hashes of all its files; made by `make lock` from pyproject.toml
# and constraints.txt. torch comes from the index that the image is built for (TORCH_INDEX), by version.
"""
_OTHERS = re.compile(r"(nvidia-|cuda-|triton==|colorama==|async-timeout==|httpx2-jsfetch)")
"""Packages of torch's own, and of systems that the image is not for."""


def main(uv: str) -> int:
    """Resolve with ``uv`` and write the file."""
    command = [uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate", "--no-header", "--universal"]
    command += ["--no-emit-package", "torch", "--python-version", "3.11", "--extra", "cluster", "--extra", "traces"]
    command += ["-c", "constraints.txt", "pyproject.toml"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    entries = [one for one in re.split(r"(?m)^(?=[A-Za-z0-9])", found) if one.strip() and not _OTHERS.match(one)]
    (ROOT / "requirements.lock").write_text(_HEAD + "".join(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
