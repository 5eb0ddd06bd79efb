"""``python -m tests.evidence.cluster``: nodes of a cluster fail for a given time; prints a table."""

import argparse
import logging
import secrets
import sys
import time
from pathlib import Path

import structlog

from tests.evidence.cluster.world import ClusterSoak
from tests.evidence.soak.report import table


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def main() -> int:
    """Run; return 0 if every guarantee was kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.cluster", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="time with faults (default 600)")
    parser.add_argument("--round", type=float, default=75, help="seconds between two counts (default 75)")
    parser.add_argument("--harm", action="append", default=[], help="only faults whose name contains this; repeatable")
    parser.add_argument("--rabbitmq", choices=["3", "4"], default="4", help="major version (default 4)")
    parser.add_argument("--seed", type=int, default=None, help="default: random")
    parser.add_argument("--logs", type=Path, help="copy all logs to this directory")
    words = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    seed = secrets.randbits(32) if words.seed is None else words.seed
    say(f"seed {seed}")
    soak = ClusterSoak(words.rabbitmq, seed, say, words.harm, logs=words.logs)
    try:
        soak.run(words.seconds, each=words.round, broker_deaths=lambda _: True)
    finally:
        print(table(soak.report), flush=True)
    return 1 if soak.report.bad else 0


if __name__ == "__main__":
    sys.exit(main())
