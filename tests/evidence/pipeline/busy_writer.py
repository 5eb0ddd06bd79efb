"""Writes a journal as fast as possible, while one transaction stays open: python FILE URL FIRST.

After each round it prints the number of the last line. It is meant to be killed.
"""

import signal
import sys
from itertools import count

import psycopg

from tests.support.journal import write

_SHORT = 20
"""Number of lines of a short transaction."""
_LONG = 40
"""Number of short transactions while the long one is open."""
_MOST = 50_000
"""Limit of lines; then it waits in the middle of a long transaction to be killed, since every line is compared."""


def main() -> None:
    """Write until the process is killed."""
    url, number = sys.argv[1], int(sys.argv[2])
    most = number + _MOST
    with psycopg.connect(url) as slow, psycopg.connect(url, autocommit=True) as quick:
        for turn in count(1):
            write(slow, number + 1, number + _SHORT)
            if number > most:
                signal.pause()
            for _ in range(_LONG):
                number += _SHORT
                write(quick, number + 1, number + _SHORT)
            # every third one is rolled back
            (slow.rollback if turn % 3 == 0 else slow.commit)()
            number += _SHORT
            print(number, flush=True)


if __name__ == "__main__":
    main()
