"""The operators' web pages with very many branches in doubt: the time until a browser has each page.

    python -m benchmarks.pages --branches 100000

This starts a standalone dtx. Its log has the half of :mod:`benchmarks.listing` with messages in the database (in which
no branch is in phase two or stuck). A signed-in client requests each page ten times.
"""

import argparse
import http.client
import time
from urllib.parse import urlencode, urlsplit

import psycopg

from benchmarks.listing import FILL
from benchmarks.support.report import Table, machine, percentile
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN, DtxService

ROUNDS = 10
LOCAL = """
DELETE FROM dtx.work WHERE branch_id IN (SELECT id FROM dtx.branch WHERE published IS NULL);
DELETE FROM dtx.branch WHERE published IS NULL;
UPDATE dtx.branch SET state = 'heuristic', outcome = 'rolled-back', stuck = NULL WHERE state <> 'prepared';
ANALYZE dtx.branch;
"""


def pages(branches: int) -> dict[str, str]:
    """Return the paths of the pages, by name."""
    last = f"order-{2 * branches:08}".encode()
    return {
        "overview": "",
        "branches": "branches",
        "newest first": "branches?sort=started&descending=yes",
        "largest first": "branches?sort=bytes&descending=yes",
        "state": "branches?state=heuristic",
        "stuck": "branches?stuck=yes",
        "owner": "branches?owner=user-7",
        "search within": f"branches?q={2 * branches:08}",
        "search, nothing": "branches?q=nothing",
        "queue": "branches?queue=queue-7",
        "exchange": "branches?exchange=exchange-7",
        "one branch": f"branch?xid={2 * branches % 7}:{last.hex()}:62",
        "outcomes": "outcomes",
        "connections": "connections",
        "audit": "audit",
    }


def sign_in(connection: http.client.HTTPConnection, url: str) -> dict[str, str]:
    """Sign in, and return the headers for further requests."""
    form = urlencode({"name": "guest", "password": "guest"})
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Origin": url}
    connection.request("POST", "/console/sign-in", form, headers)
    answer = connection.getresponse()
    answer.read()
    return {"Cookie": (answer.getheader("set-cookie") or "").partition(";")[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--branches", type=int, default=100_000)
    branches = parser.parse_args().branches
    print(f"{branches} branches in doubt, pages of 50; {machine()}\n")
    with PostgresServer() as server:
        url = server.create_migrated_database()
        with psycopg.connect(url) as connection:
            connection.execute(FILL.format(branches=2 * branches))
            connection.execute(LOCAL)
        with DtxService(database=url, options=ADMIN) as service:
            parts = urlsplit(service.admin_url)
            assert parts.hostname is not None
            browser = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
            headers = sign_in(browser, service.admin_url)
            table = Table(("page", 22), ("status", "KiB", "median ms", "worst ms"))
            for name, page in pages(branches).items():
                seconds = []
                size = status = 0
                for _ in range(ROUNDS):
                    began = time.perf_counter()
                    browser.request("GET", f"/console/{page}", headers=headers)
                    answer = browser.getresponse()
                    size, status = len(answer.read()), answer.status
                    seconds.append(time.perf_counter() - began)
                cells = (str(status), f"{size / 1024:.0f}", f"{percentile(seconds, 50) * 1e3:.1f}")
                table.row(name, (*cells, f"{max(seconds) * 1e3:.1f}"))


if __name__ == "__main__":
    main()
