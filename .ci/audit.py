"""Asks OSV whether a pinned dependency has a known vulnerability. Fails on a finding, and only then.

Without a network, or without an answer, it says so and ends with 0: a check must not depend on somebody else's server.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SECONDS = 300
_OPTIONS = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "-f", "json", "-s", "osv"]
ACCEPTED: frozenset[str] = frozenset()
"""Ids of vulnerabilities that do not concern weft; the reason stands in SECURITY.md."""


def main(pip_audit: str) -> int:
    """Ask ``pip_audit`` about constraints.txt; return 1 for findings."""
    try:
        ended = subprocess.run(
            [pip_audit, *_OPTIONS, "-r", str(ROOT / "constraints.txt")],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        answer = json.loads(ended.stdout)["dependencies"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
        sys.stderr.write(f"audit: nobody could be asked ({type(error).__name__}); known vulnerabilities are unknown\n")
        return 0
    found = [
        f"{one['name']} {one['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'no version'}"
        for one in answer
        for flaw in one.get("vulns", [])
        if flaw["id"] not in ACCEPTED
    ]
    skipped = [f"{one['name']}: {one['skip_reason']}" for one in answer if "skip_reason" in one]
    for line in [*found, *skipped]:
        sys.stderr.write(f"audit: {line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
