"""Process of the work of jobs: ``python -m workers.job_server`` does what it is asked, one job at a time.

It has the least part of what others leave of the cores: a low priority, and one thread of torch's.
"""

import os
from typing import NoReturn

from workers.child_process import Requests
from workers.loading import loading_libraries

NICENESS = 10
"""Added to the niceness of the process that asks: beside its threads a core is left to this one for a tenth of the time."""


def main() -> NoReturn:
    """Do work until standard input ends."""
    os.nice(NICENESS)
    os.environ["OMP_NUM_THREADS"] = "1"
    requests = Requests()
    # Not before: to load torch takes seconds of a core.
    with loading_libraries():
        from workers.jobs.computing import do
        from workers.jobs.work import Moved, Ready, message_bytes, read_work

    requests.answer(message_bytes(Ready()))
    while True:
        work = read_work(requests.next())
        requests.answer(message_bytes(do(work, lambda done, total: requests.answer(message_bytes(Moved(done, total))))))


if __name__ == "__main__":
    main()
