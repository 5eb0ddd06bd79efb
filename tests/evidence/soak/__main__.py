"""``python -m tests.evidence.soak``: run the soak in both modes for a given time, and print a table."""

import argparse
import logging
import secrets
import signal
import sys
import time

import structlog

from tests.evidence.soak.report import table
from tests.evidence.soak.soak import Soak
from tests.support.broker import MODES, Mode


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def main() -> int:
    """Run; return 0 if every guarantee was kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="total time with faults (default 600)")
    parser.add_argument("--round", type=float, default=40, help="seconds between two counts (default 40)")
    parser.add_argument("--mode", choices=[*MODES, "both"], default="both")
    parser.add_argument("--harm", action="append", default=[], help="only faults whose name contains this; repeatable")
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped and file systems unmounted
    # the table has the number of faults: no log line for each server and connection that ends
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    modes: list[Mode] = list(MODES) if arguments.mode == "both" else [arguments.mode]
    reports = []
    for mode in modes:
        seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
        say(f"{mode}, seed {seed}")
        soak = Soak(mode, seed, say, harm=arguments.harm)
        reports.append(soak.report)
        try:
            soak.run(arguments.seconds / len(modes), each=arguments.round, broker_deaths=lambda number: number % 3 == 1)
        finally:
            print(table(soak.report), flush=True)
    return 1 if any(report.bad for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
