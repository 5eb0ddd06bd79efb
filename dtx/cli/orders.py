"""Orders about one branch, and ``dtx bulk``: the same order for all branches that a filter finds, after a dry run.

The orders are ``commit``, ``rollback``, ``forget``, ``retry``, ``discard`` and ``redirect``.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Self, TypeVar

import click

from dtx.admin.safe_text import json_line, safe
from dtx.cli.access import HOW, ApiAccess, reach, with_access
from dtx.cli.api_client import Api, RequestRefused, branch_path
from dtx.cli.errors import EXIT_CODES, CommandError, Exit
from dtx.cli.options import (
    ABOUT_FILTER,
    ADMIN_SETTINGS,
    BROKER_SETTINGS,
    DATABASE_SETTINGS,
    SettingsCommand,
    with_filter,
    with_options,
    with_settings,
    with_xid,
)
from dtx.config import Settings

_Function = TypeVar("_Function", bound=Callable[..., Any])
ORDER_SETTINGS: Final = (*DATABASE_SETTINGS, *BROKER_SETTINGS, *ADMIN_SETTINGS)
_ROUND: Final = 250
"""Branches of one request: about a second of work, so that progress is visible and no request times out."""
_PAGE: Final = 1000
_SHOWN: Final = 20

_ABOUT: Final = {
    "commit": """Commit a prepared branch heuristically, because its transaction manager will not decide.

    Its published messages become visible at once; its consumed messages are removed for good. Until the outcome is
    forgotten, the transaction manager gets the answer xa-heurcom.""",
    "rollback": """Roll a prepared branch back heuristically, because its transaction manager will not decide.

    Its consumed messages return to their queues. Its published messages are kept, invisible to clients, and go to the
    archive with forget. Until the outcome is forgotten, the transaction manager gets the answer xa-heurrb.""",
    "forget": """Forget a heuristic outcome that is no longer needed.

    Undelivered messages go to the archive; 'dtx export --archived' exports them.""",
    "retry": """Retry phase two of a branch that is stuck; the branch then ends as it was decided.

    Use it when the cause is gone: the exchange is back, the queue accepts messages again.""",
    "discard": """Give up messages of a branch whose phase two is stuck.

    They are kept with the branch and go to the archive with forget. The outcome is mixed: the transaction manager gets
    xa-heurmix, or xa-heurhaz if it is not known whether a message arrived. The next retry completes the rest of the
    branch. 'dtx show' numbers the messages.""",
    "redirect": """Send one message of a branch whose phase two is stuck to another exchange or queue.

    The next retry sends it there, and the branch ends as it was decided. A message that the branch publishes goes to an
    exchange; a message that is put back goes to another queue.""",
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
If no dtx runs, the command takes the lease for a moment and acts as the service would; a dtx that starts meanwhile
stands by. Messages in a broker need --broker. If the broker does not answer, the decision is made durable, and the
service completes it when both run again. While another dtx has the lease, only that dtx decides.

"""
_BULK_EPILOG: Final = (
    """\b
Examples:
  dtx bulk rollback --gtrid 'order-*' --older-than 1h --dry-run
  dtx bulk rollback --gtrid 'order-*' --older-than 1h --reason "order service is gone for good, ticket 4711"
  dtx bulk forget --state heuristic --owner orders --reason "accounts have been corrected" --yes
  dtx bulk retry --stuck --reason "the disk of the broker has room again"

The command begins with a dry run of every branch, shows its results, and asks. Then each branch is decided in the
version that was shown: branches that have changed since are not touched, but listed. At least one filter is needed.
An API requires a coordinator's token.

"""
    + ABOUT_FILTER
    + "\n"
    + ALONE
    + HOW
    + "\n"
    + EXIT_CODES
)


class OrderLease:
    """A context manager for :meth:`Api.orders`, which can be left while the user is asked.

    Args:
        api: the API that takes the orders.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def pause(self) -> None:
        """Leave the context: others can take the lease."""
        self._stack.close()

    def resume(self) -> None:
        """Enter the context, at first or again."""
        self._stack.enter_context(self._api.orders())


def ask(question: str) -> None:
    """Ask the user to confirm.

    Args:
        question: without a question mark.

    Raises:
        CommandError: stdin is no terminal.
        click.Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise CommandError(
            Exit.USAGE, "stdin is no terminal, so dtx cannot ask: use --yes, or try it first with --dry-run"
        )
    click.confirm(f"{question}?", abort=True, err=True)


def require_reason(reason: str | None, *, dry_run: bool) -> str:
    """The reason; a dry run needs none.

    Raises:
        click.UsageError: the reason is missing.
    """
    if not reason and not dry_run:
        raise click.UsageError("--reason is needed: journal and audit log record it")
    return reason or "dry run"


def with_order(function: _Function) -> _Function:
    """Give a command the options of every order."""
    command: _Function = with_options(
        click.option("--reason", metavar="TEXT", help="Reason, for journal and audit log; not needed for a dry run."),
        click.option("--dry-run", is_flag=True, help="Show what would happen to each message; change nothing."),
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--json", "as_json", is_flag=True, help="The answer as one JSON object, for programs."),
    )(function)
    return command


def _command(action: str, *parameters: Callable[[Any], Any]) -> click.Command:
    examples = "".join(f"  {line}\n" for line in _EXAMPLES[action])
    epilog = f"\b\nExamples:\n{examples}\n{ALONE}{HOW}\n{EXIT_CODES}"

    def run(
        settings: Settings,
        xid: str,
        vhost: str,
        access: ApiAccess,
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
        with reach(settings, access, orders=True) as api, OrderLease(api) as lease:
            forecast = api.post(branch_path(xid, action), order | {"dry_run": True}, vhost=vhost)
            if dry_run:
                _show(forecast, as_json=as_json)
                return Exit.OK
            if not yes:
                _show(forecast, as_json=False, err=True)
                lease.pause()
                ask(f"{action} {xid}")
                lease.resume()
            # The order names the version that was shown: the API refuses it if the branch has changed since.
            version = forecast["forecast"]["version"]
            done = _carry_out(api, action, xid, vhost, order | {"version": version}, forecast)
        _show(done, as_json=as_json)
        return Exit.OK

    command = with_options(
        with_settings(*ORDER_SETTINGS), with_xid, *parameters,
        click.option("--version", type=int, metavar="NUMBER", help="Refuse if the branch has another version."),
        with_order, with_access,
    )(run)  # fmt: skip
    return click.command(action, cls=SettingsCommand, help=_ABOUT[action], epilog=epilog)(command)


def _order(action: str, more: dict[str, Any]) -> dict[str, Any]:
    match action:
        case "discard":
            return {"positions": sorted(set(more["positions"]))}
        case "redirect":
            to_exchange = more["exchange"] is not None or more["routing_key"] is not None
            if to_exchange == (more["queue"] is not None):
                raise click.UsageError("name the destination: --exchange and --routing-key, or --queue")
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
    except RequestRefused as error:
        if api.away is None or error.status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        branch = api.get(branch_path(xid), vhost=vhost)["branch"]
        if branch["version"] == order["version"]:
            raise
        return {**forecast, "dry_run": False, "state": branch["state"], "version": branch["version"], "left": api.away}
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
    if forecast["later_answer"].startswith("xa-"):
        click.echo(f"the transaction manager gets {forecast['later_answer']}", err=err)
    if forecast["archived"]:
        click.echo(f"undelivered messages that are kept for the archive: {forecast['archived']}", err=err)
    if answer["dry_run"]:
        return
    if answer.get("left"):
        click.echo(f"the decision is durable: the branch is {answer['state']}")
        click.echo(f"the rest needs the broker; the service completes it when both run again ({safe(answer['left'])})")
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
    click.option("--exchange", metavar="EXCHANGE", help="New exchange of a published message; '' is the default."),
    click.option("--routing-key", metavar="KEY", help="With --exchange."),
    click.option("--queue", metavar="QUEUE", help="Queue that a consumed message is put back into."),
)


@click.command("bulk", cls=SettingsCommand, epilog=_BULK_EPILOG)
@with_settings(*ORDER_SETTINGS)
@click.argument("action", type=click.Choice(["commit", "rollback", "forget", "retry"]))
@with_filter
@with_order
@with_access
def bulk(
    settings: Settings,
    action: str,
    wanted: dict[str, Any],
    access: ApiAccess,
    reason: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Decide about all branches that a filter finds: commit, rollback, forget or retry."""
    why = require_reason(reason, dry_run=dry_run)
    if not wanted:
        raise click.UsageError("a filter is needed: --gtrid, --older-than, --state ...")
    with reach(settings, access, orders=True) as api, OrderLease(api) as lease:
        rounds = _rounds(api, action, wanted, why)
        forecast = _Forecast(action, as_json=as_json and dry_run)
        with _progress("dry run", sum(each.count for each in rounds)) as advance:
            for each in rounds:
                forecast.add(each.forecast())
                advance(each.count)
        forecast.show()
        if dry_run or not forecast.count:
            return Exit.OK
        if not yes:
            lease.pause()
            ask(f"{action} {forecast.count} branches")
            lease.resume()
        results = _Results(as_json=as_json)
        try:
            with _progress(action, forecast.count) as advance:
                for each in rounds:
                    expected = results.under_way = each.count
                    results.add(each.carry_out())
                    results.under_way = 0
                    advance(expected)
        finally:  # a user that interrupts it must see how many are done
            results.show()
    return Exit.OK if not results.failed else Exit.FAILED


@dataclass(frozen=True, slots=True)
class ListedBranch:
    """The identity and version of a listed branch: nothing else is kept in memory, since there may be 100,000.

    Args:
        id: the branch.
        xid: its xid.
        vhost: its virtual host.
        version: its version in the list.
    """

    id: str
    xid: str
    vhost: str
    version: int

    @classmethod
    def of(cls, listed: Mapping[str, Any]) -> "ListedBranch":
        """From a branch in a list of the API."""
        return cls(listed["id"], listed["xid"], listed["vhost"], listed["version"])


class BulkRound:
    """Branches that are decided in one request.

    Args:
        api: the API that decides.
        action: the order: ``commit``, ``rollback``, ``forget`` or ``retry``.
        wanted: the filter that found the branches.
        why: the reason.
        branches: the branches.
    """

    def __init__(self, api: Api, action: str, wanted: dict[str, Any], why: str, branches: list[ListedBranch]) -> None:
        self._api = api
        self._order = {"action": action, "reason": why}
        self._filter = wanted
        self._branches = branches
        self._confirm = ""
        self.count = len(branches)
        """Number of branches; after the dry run, number of those that the filter still finds."""

    def forecast(self) -> list[dict[str, Any]]:
        """Make a dry run and return its result for each branch."""
        answer = self._post(dry_run=True)
        results: list[dict[str, Any]] = answer["results"]
        self._confirm, self.count = answer["confirm"], len(results)
        return results

    def _ids(self) -> list[str]:
        return [branch.id for branch in self._branches]

    def _post(self, **more: object) -> dict[str, Any]:
        wanted = {**self._filter, "branch": self._ids()}
        answer: dict[str, Any] = self._api.post("/dtx/v1/bulk", {**self._order, "filter": wanted, **more})
        return answer

    def carry_out(self) -> Iterator[dict[str, Any]]:
        """Decide, and return a result for each branch. Branches that have changed since the list are left out."""
        while self._branches:
            try:
                yield from self._post(dry_run=False, confirm=self._confirm)["results"]
            except RequestRefused as error:
                if error.status != HTTPStatus.PRECONDITION_FAILED:
                    yield from self._not_done(self._branches, error.sentence)
                    return
            else:
                return
            # Versions only grow: a branch with its old version after this dry run had that version during it.
            self.forecast()
            found = self._api.get("/dtx/v1/branches", **self._filter, branch=self._ids(), limit=_ROUND)["branches"]
            same = {branch["id"]: branch["version"] for branch in found}
            changed = [branch for branch in self._branches if same.get(branch.id) != branch.version]
            yield from self._not_done(changed, "the branch has changed since it was shown")
            self._branches = [branch for branch in self._branches if branch not in changed]
            if changed and self._branches:
                self.forecast()

    def _not_done(self, branches: list[ListedBranch], why: str) -> Iterator[dict[str, Any]]:
        for branch in branches:
            yield {"xid": branch.xid, "vhost": branch.vhost, "answer": why, "done": False}


def _rounds(api: Api, action: str, wanted: dict[str, Any], why: str) -> list[BulkRound]:
    found: list[ListedBranch] = []
    with _progress("looking", None) as advance:
        for branch in api.pages("/dtx/v1/branches", "branches", **wanted, limit=_PAGE):
            found.append(ListedBranch.of(branch))
            advance(1)
    return [
        BulkRound(api, action, wanted, why, found[start : start + _ROUND]) for start in range(0, len(found), _ROUND)
    ]


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr if that is a terminal; else nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


class _Forecast:
    """Results of the dry run: counts of all and the first ones in full; for programs, each one as it arrives."""

    def __init__(self, action: str, *, as_json: bool) -> None:
        self._action = action
        self._as_json = as_json
        self._first: list[dict[str, Any]] = []
        self._answers: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Number of branches so far."""
        return self._answers.total()

    def add(self, results: Iterable[dict[str, Any]]) -> None:
        """Add results."""
        for each in results:
            self._answers[_kind(each)] += 1
            if self._as_json:
                click.echo(json_line(each))
            elif len(self._first) < _SHOWN:
                self._first.append(each)

    def show(self) -> None:
        """Print a summary for people."""
        if self._as_json:
            return
        if not self.count:
            click.echo("no branch matches the filter", err=True)
            return
        for each in self._first:
            click.echo(f"  {each['xid']}  {safe(each['vhost'])}  {safe(each['answer'])}", err=True)
        if self.count > len(self._first):
            click.echo(f"  and {self.count - len(self._first)} more: --dry-run --json lists them all", err=True)
        words = ", ".join(f"{count} {word}" for word, count in self._answers.most_common())
        click.echo(f"{self._action} of {self.count} branches; answers to their transaction managers: {words}", err=True)


class _Results:
    """Results of the order: counts of all and the first failures in full; for programs, each one as it arrives."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._first: list[dict[str, Any]] = []
        self._count = 0
        self.failed = 0
        """Number of branches that were not decided."""
        self.under_way = 0
        """Number of branches in the request that has no answer yet."""

    def add(self, results: Iterable[dict[str, Any]]) -> None:
        """Add results."""
        for each in results:
            self._count += 1
            if self._as_json:
                click.echo(json_line(each))
            if not each["done"]:
                self.failed += 1
                if len(self._first) < _SHOWN:
                    self._first.append(each)

    def show(self) -> None:
        """Print a summary for people."""
        if self.under_way:
            click.echo(f"up to {self.under_way} more were under way: 'dtx audit' shows their results", err=True)
        if self._as_json:
            return
        for each in self._first:
            click.echo(f"  {each['xid']}  {safe(each['vhost'])}  not done: {safe(each['answer'])}")
        if self.failed > len(self._first):
            click.echo(f"  and {self.failed - len(self._first)} more")
        click.echo(f"{self._count - self.failed} of {self._count} done")


def _kind(result: dict[str, Any]) -> str:
    """The part of a result that many branches share; a sentence about one xid is not counted separately."""
    answer = str(result["answer"])
    return answer if answer.startswith("xa-") or answer == "404" else "not possible"
