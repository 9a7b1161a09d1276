"""Guard process: runs a vLLM server that must not outlive weft. Standard library only, so that it starts at once.

``guard.py GRACE_SECONDS FOLDER COMMAND...`` runs the command in a process group of its own, removes the folder once it has
ended, and exits with its status. The group's id is the only line on standard output; the command's output goes to standard error.

Two events end the group: SIGTERM to the guard, and the end of standard input. Standard input ends when the parent is gone,
however the parent died. The group gets SIGTERM, and SIGKILL after the grace. No process of the group is left behind.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM to the child, which calls this, when the guard dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap_all() -> None:
    """Wait until every descendant has ended."""
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
    """Run the command and return its exit status: 128 and more for a signal, as in a shell."""
    grace_s, folder, command = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    # A group of its own, so that a terminal's Ctrl-C does not reach the guard. No session of its own: Linux may share the
    # cores between sessions (autogroups), and a busy server in another session would starve weft.
    os.setpgid(0, 0)
    # Orphaned workers become the guard's children: the first process of a container may leave them as zombies.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Before any thread starts: code between fork and exec must not need another thread's lock.
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
        # vLLM's workers do not end when their server is killed.
        _signal_group(child.pid, signal.SIGKILL)
        _reap_all()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
