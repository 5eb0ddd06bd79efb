"""Orders about one branch: ``commit``, ``rollback``, ``forget``, ``retry``, ``discard``, ``redirect``."""

from collections.abc import Callable
from functools import wraps
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import quote

import click

from dtx.admin.safe_text import json_line, safe
from dtx.cli.consent import Turn, ask, require_reason
from dtx.cli.console.access import HOW, Access, with_access
from dtx.cli.console.reach import Api, reach
from dtx.cli.console.remote import Refused
from dtx.cli.errors import EXIT_CODES, Exit
from dtx.cli.options import ADMIN_SETTINGS, BROKER_SETTINGS, DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.config import Settings
from dtx.xa.codes import XaError
from dtx.xa.xid import Xid

_Function = TypeVar("_Function", bound=Callable[..., Any])
ORDER_SETTINGS: Final = (*DATABASE_SETTINGS, *BROKER_SETTINGS, *ADMIN_SETTINGS)

_ABOUT: Final = {
    "commit": """Commit a prepared branch heuristically, since its transaction manager will not decide.

    What it published is seen at once, what it consumed is gone for good. The transaction manager is told xa-heurcom
    when it comes after all, until the outcome is forgotten.""",
    "rollback": """Roll a prepared branch back heuristically, since its transaction manager will not decide.

    What it consumed returns to its queues. What it published is kept, seen by nobody, and goes to the archive with
    forget. The transaction manager is told xa-heurrb when it comes after all, until the outcome is forgotten.""",
    "forget": """Forget a heuristic outcome, once everybody who has to know it does.

    Messages that nobody got go to the archive; 'dtx export --archived' gets them from there.""",
    "retry": """Try again what a decided branch is stuck with: it ends as it was decided.

    For the time after the cause is mended: the exchange is back, the queue takes messages again.""",
    "discard": """Give up messages that phase two of a branch is stuck with.

    They are kept with the branch and go to the archive with forget. The outcome is mixed: the transaction manager is
    told xa-heurmix, or xa-heurhaz where it is not known whether a message came in nevertheless. What is left of the
    branch goes on with the next retry. 'dtx show' numbers the messages.""",
    "redirect": """Send one message that phase two of a branch is stuck with elsewhere.

    It goes there with the next retry, and the branch ends as it was decided. A message that the branch publishes goes
    to an exchange; one that is to be put back goes to another queue.""",
}
_EXAMPLES: Final = {
    "commit": ('dtx commit 1:6774:62 --reason "the other side has committed, ticket 4711"',),
    "rollback": (
        "dtx branches --state prepared --older-than 1h",
        "dtx rollback 1:6774:62 --dry-run",
        'dtx rollback 1:6774:62 --reason "order service lost its log, ticket 4711"',
    ),
    "forget": ('dtx forget 1:6774:62 --reason "accounts have been corrected, ticket 4711"',),
    "retry": ("dtx branches --stuck", 'dtx retry 1:6774:62 --reason "exchange orders is back"'),
    "discard": (
        "dtx export 1:6774:62 --to kept",
        'dtx discard 1:6774:62 3 4 --reason "the queue is gone for good, sent by hand"',
    ),
    "redirect": (
        'dtx redirect 1:6774:62 3 --exchange orders2 --routing-key new --reason "orders was renamed"',
        'dtx redirect 1:6774:62 5 --queue incoming2 --reason "incoming is gone"',
        'dtx retry 1:6774:62 --reason "redirected"',
    ),
}
ALONE: Final = """
Where no dtx runs, the command takes its lease for a moment and does it as the service would; a dtx that is started
meanwhile stands by. Messages in a broker need --broker. If that does not answer, the decision is made durable, and the
service does the rest when both are there. While another dtx has the lease nothing is decided past it.

"""


def with_order(function: _Function) -> _Function:
    """Give a command what every order takes."""
    command: Any = function
    for option in reversed((
        click.option("--reason", metavar="TEXT", help="Why; for journal and trail. Needed unless it is a dry run."),
        click.option("--dry-run", is_flag=True, help="Say what would happen to each message, and do nothing."),
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--json", "as_json", is_flag=True, help="The answer as one JSON object, for programs."),
    )):  # fmt: skip
        command = option(command)
    decorated: _Function = command
    return decorated


def with_xid(function: _Function) -> _Function:
    """Give a command the argument XID, checked, and ``--vhost``."""

    @wraps(function)
    def run(*args: Any, xid: str, **kwargs: Any) -> Any:
        try:
            return function(*args, xid=str(Xid.parse(xid)), **kwargs)
        except XaError as error:
            raise click.BadParameter(safe(error.reason), param_hint="XID") from None

    command: Any = click.option(
        "--vhost", default="/", show_default=True, metavar="VHOST", help="The virtual host of the branch."
    )(run)
    decorated: _Function = click.argument("xid")(command)
    return decorated


def branch_path(xid: str, rest: str) -> str:
    """Of what the API does with one branch."""
    return f"/api/branches/{quote(xid, safe='')}/{rest}"


def _command(action: str, *parameters: Callable[[Any], Any]) -> click.Command:
    examples = "".join(f"  {line}\n" for line in _EXAMPLES[action])
    epilog = f"\b\nExamples:\n{examples}\n{ALONE}{HOW}\n{EXIT_CODES}"

    def run(
        settings: Settings,
        xid: str,
        vhost: str,
        access: Access,
        version: int | None,
        reason: str | None,
        dry_run: bool,
        yes: bool,
        as_json: bool,
        **more: Any,
    ) -> int:
        order = _order(action, more) | {"reason": require_reason(reason, dry_run=dry_run)}
        if version is not None:
            order["version"] = version
        with reach(settings, access, orders=True) as api, Turn(api) as turn:
            forecast = api.post(branch_path(xid, action), order | {"dry_run": True}, vhost=vhost)
            if dry_run:
                _show(forecast, as_json=as_json)
                return Exit.OK
            if not yes:
                _show(forecast, as_json=False, err=True)
                turn.pause()
                ask(f"{action} {xid}")
                turn.go_on()
            # What was shown is what is done, or nothing.
            version = forecast["forecast"]["version"]
            done = _carry_out(api, action, xid, vhost, order | {"version": version}, forecast)
        _show(done, as_json=as_json)
        return Exit.OK

    command: Any = run
    for option in reversed((
        with_settings(*ORDER_SETTINGS), with_xid, *parameters,
        click.option("--version", type=int, metavar="NUMBER", help="Refuse where the branch has another one."),
        with_order, with_access,
    )):  # fmt: skip
        command = option(command)
    made: click.Command = click.command(action, cls=SettingsCommand, help=_ABOUT[action], epilog=epilog)(command)
    return made


def _order(action: str, more: dict[str, Any]) -> dict[str, Any]:
    match action:
        case "discard":
            return {"positions": sorted(set(more["positions"]))}
        case "redirect":
            to_exchange = more["exchange"] is not None or more["routing_key"] is not None
            if to_exchange == (more["queue"] is not None):
                raise click.UsageError("say where it goes: --exchange and --routing-key, or --queue")
            if more["queue"] is not None:
                return {"position": more["position"], "queue": more["queue"]}
            return {
                "position": more["position"],
                "exchange": more["exchange"] or "",
                "routing_key": more["routing_key"] or "",
            }
        case _:
            return {}


def _carry_out(
    api: Api, action: str, xid: str, vhost: str, order: dict[str, Any], forecast: dict[str, Any]
) -> dict[str, Any]:
    try:
        done: dict[str, Any] = api.post(branch_path(xid, action), order, vhost=vhost)
    except Refused as error:
        away = getattr(api, "away", None)
        if away is None or error.status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        branch = api.get(branch_path(xid, "").rstrip("/"), vhost=vhost)["branch"]
        if branch["version"] == order["version"]:
            raise
        return {**forecast, "dry_run": False, "state": branch["state"], "version": branch["version"], "left": away}
    return done


def _show(answer: dict[str, Any], *, as_json: bool, err: bool = False) -> None:
    if as_json:
        click.echo(json_line(answer))
        return
    forecast = answer["forecast"]
    for message in forecast["messages"]:
        where = (
            f"queue {message['queue']!r}"
            if message["kind"] == "consume"
            else f"exchange {message['exchange']!r}, routing key {message['routing_key']!r}"
        )
        click.echo(
            f"  {message['position']:>5}  {message['kind']:<8} {message['fate'] or 'moved':<10} {where}", err=err
        )
    ends = "leaves the log" if forecast["becomes"] == "unknown" else f"becomes {forecast['becomes']}"
    click.echo(f"the branch is {forecast['state']} (version {forecast['version']}) and {ends}", err=err)
    if forecast["told"].startswith("xa-"):
        click.echo(f"its transaction manager is told {forecast['told']}", err=err)
    if forecast["archived"]:
        click.echo(f"{forecast['archived']} message(s) that nobody got are kept for the archive", err=err)
    if answer["dry_run"]:
        return
    if answer.get("left"):
        click.echo(f"decided, and durable: the branch is {answer['state']}")
        click.echo(
            f"what is left needs the broker, and the service does it once both are there ({safe(answer['left'])})"
        )
    else:
        click.echo(f"done: {answer['answer']}")


commit = _command("commit")
rollback = _command("rollback")
forget = _command("forget")
retry = _command("retry")
discard = _command(
    "discard", click.argument("positions", nargs=-1, required=True, type=click.IntRange(min=0), metavar="POSITION...")
)
redirect = _command(
    "redirect",
    click.argument("position", type=click.IntRange(min=0)),
    click.option("--exchange", metavar="EXCHANGE", help="Where a message that was published goes; '' is the default."),
    click.option("--routing-key", metavar="KEY", help="With --exchange."),
    click.option("--queue", metavar="QUEUE", help="Where a message that was consumed is put back."),
)
