"""Marks a file as being written, so that nobody closes it under a writer that lives.

The lock belongs to a process: it ends with the process, however that ends, and children do not inherit it. It
is advice among writers of traces; where the file system knows no locks there is none.
"""

from __future__ import annotations

import errno
import fcntl


def lock(file: int) -> bool:
    """Take the lock of an open file. False when another process holds it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        return problem.errno not in (errno.EACCES, errno.EAGAIN)
    return True
