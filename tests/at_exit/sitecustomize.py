"""In programs that have this directory on their path: names our threads that the exit leaves.

Python imports this module when it starts, so what it registers is called last.
"""

import atexit
import sys
import threading


def name_threads() -> None:
    left = [t.name for t in threading.enumerate() if t.name.startswith("spdl_torch-")]
    if left:
        sys.stdout.write(f"threads at the exit: {' '.join(left)}\n")
        sys.stdout.flush()


atexit.register(name_threads)
