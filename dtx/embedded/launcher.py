"""Become the account that PostgreSQL runs as, ask to be told of the parent's death, and turn into a server program.

Run as a script by ``dtx.embedded.postgres`` (``python -I -S launcher.py UID GID SIGNAL PARENT PROGRAM ARG…``), never
imported by the service. It is a program of its own because the order matters: changing the user clears the
parent-death signal, so that must be asked for afterwards; and code between fork and exec in a process with threads
(``preexec_fn``) can deadlock.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Replace this process with ``PROGRAM ARG…``.

    Args:
        argv: uid and gid to become (both -1: stay), the signal wanted when the parent dies, the parent's process id,
            the program and its arguments.
    """
    uid, gid, signal_number, parent = (int(word) for word in argv[:4])
    program = argv[4:]
    # loaded first: the library may lie where the account cannot read
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None
    os.setsid()  # the terminal's ^C goes to dtx, which ends its work before it ends PostgreSQL
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    os.umask(0o077)
    if prctl is not None and prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)  # it died before we asked to be told
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
