"""Runs a command that must not outlive the process that asked for it. Standard library only: it starts in no time.

``vllm_guard.py GRACE_SECONDS COMMAND...`` runs the command as a process group of its own, whose id is the only line on
standard output, and exits as it does; what the command writes goes to standard error. SIGTERM ends the group, and so
does the end of standard input, which comes when the parent is gone, however it died: SIGTERM, after the grace SIGKILL.
Nothing of the group is left behind.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _end_with_parent() -> None:
    """In the child: SIGTERM should the guard itself be killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap_all() -> None:
    """Wait for every descendant to be gone."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def main() -> int:
    """Returns the command's exit status, 128 and more for a signal as in a shell."""
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    # A terminal's Ctrl-C is not for the guard. No session of its own: Linux may share the cores between sessions (its
    # autogroups), and weft and a server that is busy would stand on two sides.
    os.setpgid(0, 0)
    # Orphaned workers become the guard's children: the first process of a container may leave them as zombies.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Before any thread: what runs between fork and exec must not meet another thread's locks.
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, process_group=0, preexec_fn=_end_with_parent
    )
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    stopping = threading.Event()
    ended = threading.Event()

    def end_group() -> None:
        stopping.wait()
        _signal_group(child.pid, signal.SIGTERM)
        if not ended.wait(grace_s):
            _signal_group(child.pid, signal.SIGKILL)

    def watch_parent() -> None:
        # Unbuffered: a buffer's lock, held by a thread, would crash the interpreter's exit.
        while os.read(0, 1024):
            continue
        stopping.set()

    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    for work in (end_group, watch_parent):
        threading.Thread(target=work, daemon=True).start()
    try:
        status = child.wait()
        return status if status >= 0 else 128 - status
    finally:
        ended.set()
        # vLLM's workers go on for ever when their server was killed.
        _signal_group(child.pid, signal.SIGKILL)
        _reap_all()


if __name__ == "__main__":
    sys.exit(main())
