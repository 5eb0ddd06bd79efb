"""Change to the account that PostgreSQL runs as, request the parent-death signal, and execute a server program.

``dtx.embedded.cluster`` runs it as a script (``python -I -S launcher.py UID GID SIGNAL PARENT PROGRAM ARG…``). It is a
program of its own for two reasons. A change of the user clears the parent-death signal, so the order matters. Code
between fork and exec in a process with threads (``preexec_fn``) can deadlock.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Replace this process with ``PROGRAM ARG…``.

    Args:
        argv: uid and gid to change to (both -1: no change), the signal for the parent's death, the parent's process id,
            the program and its arguments.
    """
    uid, gid, signal_number, parent = (int(word) for word in argv[:4])
    program = argv[4:]
    # loaded first: the account may not be able to read the library
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None
    os.setsid()  # the terminal's ^C goes only to dtx, which ends its work before it stops PostgreSQL
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    os.umask(0o077)
    if prctl is not None and prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)  # the parent died before the request
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
