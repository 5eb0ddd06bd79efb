"""A program that writes a journal as fast as it can, with a transaction that stays open beside: python FILE URL FIRST.

It says after each round how many lines there are of it. It is meant to be killed.
"""

import signal
import sys
from itertools import count

import psycopg

from tests.support.journal import write

_SHORT = 20
"""Lines of a short transaction."""
_LONG = 40
"""Short transactions that come and go while the long one is open."""
_MOST = 50_000
"""Lines, after which it waits to be killed, in the middle of a long transaction: all are compared one by one."""


def main() -> None:
    """Write until somebody ends it."""
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
            # every third one is given up
            (slow.rollback if turn % 3 == 0 else slow.commit)()
            number += _SHORT
            print(number, flush=True)


if __name__ == "__main__":
    main()
