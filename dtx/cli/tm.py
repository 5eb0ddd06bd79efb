"""``dtx tm``: recovery for programs that use the transaction manager of ``dtx.client.tm``, and lists of its log."""

import logging
import os
import signal
import threading
import tomllib
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from dtx.admin.safe_text import json_line, safe
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import Subcommands, duration, with_options
from dtx.cli.output import Column, Listing, with_listing

_KEYS: Final = frozenset({"node", "log", "format_id", "resources"})
_LOGS: Final = ("sqlite://", "postgresql://", "postgres://")
_SCHEMES: Final = ("amqp", "amqps", "postgresql", "postgres")

_EPILOG: Final = """\b
Examples:
  dtx tm recover --config tm.toml
  dtx tm recover --config tm.toml --watch --every 30s
  dtx tm recover --node orders-1 --log tm.db --resource queue=amqp://orders@127.0.0.1/ --resource db=postgresql:///orders
  dtx tm list --config tm.toml
  dtx tm heuristics --config tm.toml --json

\b
The file has the arguments that the program gives its TransactionManager; the names must be the same:
  node = "orders-1"
  log = "/var/lib/orders/tm.db"            # or postgresql://…
  [resources]
  queue = "amqp://orders:secret@127.0.0.1:5673/"
  orders = "postgresql://orders:secret@db/orders"

Write passwords in that file (mode 0600), not on a command line. Branches of other nodes are never changed.
"""


@click.group(cls=Subcommands, epilog=_EPILOG)
def tm() -> None:
    """The Python transaction manager: recover transactions of programs that died, list decisions and outcomes."""


_with_manager = with_options(
    click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="TOML file, see 'dtx tm -h'."),
    click.option("--node", metavar="NAME", help="Name of the node, as in the program."),
    click.option("--log", metavar="WHERE", help="The log of decisions: a SQLite file, or postgresql://…"),
    click.option(
        "--resource",
        "resources",
        metavar="NAME=URL",
        multiple=True,
        help="amqp://… or postgresql://…; can be repeated.",
    ),
    click.option("--format-id", type=int, help="Format id of the xids, if the program sets one."),
)


@tm.command()
@_with_manager
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C or SIGTERM.")
@click.option(
    "--every", default="60s", show_default=True, callback=duration, metavar="TIME", help="With --watch: the interval."
)
@click.option(
    "--interval",
    default="60s",
    show_default=True,
    callback=duration,
    metavar="TIME",
    help="Younger undecided branches are not changed.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a round, for programs.")
def recover(*, watch: bool, every: float, interval: float, as_json: bool, **given: Any) -> int:
    """Complete open transactions of a node.

    It commits those that were decided, and rolls the others back. A branch is rolled back only if its process is
    dead, it is older than --interval, and the log of decisions has recorded the rollback. The exit code is 1 if a
    branch could not be completed yet.
    """
    manager = _manager(interval=interval, **given)
    stopped = threading.Event()
    if watch:
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        signal.signal(signal.SIGINT, lambda *_: stopped.set())
    clean = True
    try:
        while not stopped.is_set():
            clean = _round(manager, as_json=as_json, patient=watch)
            if not watch:
                break
            stopped.wait(every)
    finally:
        manager.close()
    return Exit.OK if clean or watch else Exit.FAILED


def _round(manager: Any, *, as_json: bool, patient: bool) -> bool:
    from dtx.client.tm import LogFailed

    try:
        report = manager.recover()
    except LogFailed as error:
        if not patient:
            raise CommandError(Exit.DATABASE, str(error)) from error
        click.echo(f"dtx: {error}; the next round tries again", err=True)
        return False
    if as_json:
        click.echo(
            json_line(
                {
                    "committed": [str(xid) for xid in report.committed],
                    "rolled_back": [str(xid) for xid in report.rolled_back],
                    "one_phase": [str(xid) for xid in report.one_phase],
                    "waiting": {str(xid): why for xid, why in report.waiting.items()},
                    "unreachable": report.unreachable,
                    "heuristics": [str(found) for found in report.heuristics],
                }
            )
        )
    else:
        click.echo(safe(str(report)))
        for xid, why in report.waiting.items():
            click.echo(f"  {xid}  {safe(why)}")
        for found in report.heuristics:
            click.echo(f"  heuristic: {safe(str(found))}")
    return bool(report.clean)


@tm.command("list")
@_with_manager
@with_listing
def list_unfinished(*, listing: Listing, **given: Any) -> int:
    """List unfinished decisions to commit. Their branches are not all committed yet."""
    columns = (*map(Column, ("gtrid", "decision", "at", "resources")), Column("recoveries", number=True))
    with closing(_manager(**given)) as manager:
        listing.show(
            lambda: (
                {
                    "gtrid": row.gtrid.decode("ascii", "replace"),
                    "decision": row.decision.value,
                    "at": row.at.isoformat(),
                    "resources": list(row.resources),
                    "recoveries": row.recoveries,
                }
                for row in manager.log.unfinished(manager.node)
            ),
            columns,
            "every decision is finished",
        )
    return Exit.OK


@tm.command()
@_with_manager
@click.option("--unforgotten", is_flag=True, help="Only outcomes that the resource has not forgotten.")
@with_listing
def heuristics(*, unforgotten: bool, listing: Listing, **given: Any) -> int:
    """List heuristic outcomes. Their branches were completed without the transaction manager."""
    names = ("gtrid", "resource", "outcome", "decision", "damaging", "at", "forgotten", "reason")
    with closing(_manager(**given)) as manager:
        listing.show(
            lambda: (
                {
                    "gtrid": report.gtrid.decode("ascii", "replace"),
                    "resource": report.resource,
                    "outcome": report.outcome.value,
                    "decision": report.decision,
                    "damaging": report.damaging,
                    "reason": report.reason,
                    "at": at.isoformat(),
                    "forgotten": _text(forgotten),
                }
                for report, at, forgotten in manager.log.heuristics(unforgotten=unforgotten)
            ),
            [Column(name) for name in names],
            "there is no heuristic outcome",
        )
    return Exit.OK


def _text(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _manager(
    *,
    config: Path | None,
    node: str | None,
    log: str | None,
    resources: tuple[str, ...],
    format_id: int | None,
    interval: float = 60.0,
) -> Any:
    """The transaction manager that the file and the flags describe; flags override the file."""
    from dtx.client.tm import FORMAT_ID, LogFailed, Misuse, TransactionManager

    logging.getLogger("pika").setLevel(logging.CRITICAL)  # the report has these errors
    settings = _read(config) if config is not None else {}
    urls: dict[str, str] = dict(settings.get("resources", {}))
    for word in resources:
        name, found, url = word.partition("=")
        if not found:
            raise CommandError(Exit.USAGE, "--resource must be NAME=URL")  # not quoted: it may have a password
        urls[name] = url
    node = node or settings.get("node")
    log = log or settings.get("log")
    if not node or not log:
        raise CommandError(
            Exit.USAGE, "name the node and its log: --config FILE, or --node and --log (see 'dtx tm -h')"
        )
    if "://" in log and not log.startswith(_LOGS):
        raise CommandError(Exit.USAGE, "--log must be the path of a SQLite file, or postgresql://…")
    if not log.startswith(("postgresql://", "postgres://")) and not Path(log.removeprefix("sqlite://")).exists():
        raise CommandError(Exit.FAILED, f"there is no log of decisions at {log}: name the log that the program uses")
    try:
        return TransactionManager(
            node=node,
            log=log,
            resources=[_resource(name, url) for name, url in urls.items()],
            interval=interval,
            recover_every=None,
            format_id=format_id or settings.get("format_id", FORMAT_ID),
        )
    except Misuse as error:
        raise CommandError(Exit.USAGE, str(error)) from error
    except LogFailed as error:
        raise CommandError(Exit.DATABASE, str(error)) from error


def _resource(name: str, url: str) -> Any:
    scheme = url.partition("://")[0]
    if scheme not in _SCHEMES:
        raise CommandError(Exit.USAGE, f"resource {name}: its URL must begin with amqp://, amqps:// or postgresql://")
    # Errors of the libraries are not shown: they quote parts of the URL, which may have a password.
    if scheme.startswith("amqp"):
        import pika

        from dtx.client.tm import DtxResource

        try:
            pika.URLParameters(url)
        except ValueError:
            raise CommandError(Exit.USAGE, f"resource {name}: its URL is not a valid AMQP URL") from None
        return DtxResource(name, url)
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    from dtx.client.tm import Pep249Resource

    try:
        conninfo_to_dict(url)
    except psycopg.Error:
        raise CommandError(Exit.USAGE, f"resource {name}: its URL is not a valid PostgreSQL URL") from None
    return Pep249Resource(name, partial(psycopg.connect, url, connect_timeout=10))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(Exit.USAGE, f"cannot read {path}: {os.strerror(error.errno or 0).lower()}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandError(Exit.USAGE, f"{path} is not TOML: {error}") from error
    unknown = found.keys() - _KEYS
    if unknown:
        raise CommandError(
            Exit.USAGE, f"{path}: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(_KEYS))}"
        )
    urls = found.get("resources", {})
    texts = isinstance(urls, dict) and all(isinstance(url, str) for url in urls.values())
    if not texts or not all(isinstance(found.get(key, ""), str) for key in ("node", "log")):
        raise CommandError(Exit.USAGE, f"{path}: node, log and the URLs of resources must be strings")
    if type(found.get("format_id", 0)) is not int:
        raise CommandError(Exit.USAGE, f"{path}: format_id must be a number")
    return found
