"""The tour of the web pages with a picture of every step: ``python -m tests.walkthrough --into DIRECTORY``."""

import argparse
from pathlib import Path

from tests.support.browser import Browser
from tests.support.crash import StandaloneStage
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN
from tests.walkthrough.tour import Tour


def main() -> None:
    """Walk, and say where the pictures are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("walkthrough"), help="directory of the pictures")
    directory: Path = parser.parse_args().into
    directory.mkdir(parents=True, exist_ok=True)
    with Browser() as browser, PostgresServer() as server, StandaloneStage(server, options=ADMIN) as scene:
        tour = Tour(scene, browser, directory, print)
        tour.populate()
        for step in (
            tour.orphan_is_decided,
            tour.two_race,
            tour.viewer_is_refused,
            tour.many_are_decided,
            tour.everything_else,
            tour.secrets_are_nowhere,
        ):
            print((step.__doc__ or "").partition("\n")[0])
            step()
    print(f"all as it should be; the pictures are in {directory.resolve()}")


if __name__ == "__main__":
    main()
