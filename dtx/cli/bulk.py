"""``dtx bulk``: one decision about all branches that a filter finds, each of them shown before."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dtx.admin.shown.text import json_line, safe
from dtx.cli.branches import pages
from dtx.cli.consent import Turn, ask, require_reason
from dtx.cli.console.access import HOW, Access, with_access
from dtx.cli.console.reach import Api, reach
from dtx.cli.console.remote import Refused
from dtx.cli.errors import EXIT_CODES, Exit
from dtx.cli.filters import ABOUT, with_filter
from dtx.cli.options import SettingsCommand, with_settings
from dtx.cli.orders import ALONE, ORDER_SETTINGS, with_order
from dtx.config import Settings

_ROUND: Final = 100
"""Branches of one request: a second of work, so that progress is seen and nobody waits in vain."""
_SHOWN: Final = 20

_EPILOG: Final = (
    """\b
Examples:
  dtx bulk rollback --gtrid 'order-*' --older-than 1h --dry-run
  dtx bulk rollback --gtrid 'order-*' --older-than 1h --reason "order service is gone for good, ticket 4711"
  dtx bulk forget --state heuristic --owner orders --reason "accounts have been corrected" --yes
  dtx bulk retry --stuck --reason "the disk of the broker has room again"

It always begins with a dry run of every branch, shows what comes of it, and asks. Then each branch is decided in the
version that was shown: whatever has changed meanwhile is left alone and named. At least one filter is needed. It
takes a coordinator's token.

"""
    + ABOUT
    + "\n"
    + ALONE
    + HOW
    + "\n"
    + EXIT_CODES
)


@click.command("bulk", cls=SettingsCommand, epilog=_EPILOG)
@with_settings(*ORDER_SETTINGS)
@click.argument("action", type=click.Choice(["commit", "rollback", "forget", "retry"]))
@with_filter
@with_order
@with_access
def bulk(
    settings: Settings,
    action: str,
    wanted: dict[str, Any],
    access: Access,
    reason: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Decide about all branches that a filter finds: commit, rollback, forget or retry."""
    why = require_reason(reason, dry_run=dry_run)
    if not wanted:
        raise click.UsageError("say which branches are meant: --gtrid, --older-than, --state ...")
    with reach(settings, access, orders=True) as api, Turn(api) as turn:
        rounds = list(_forecast(api, action, wanted, why))
        forecasts = [forecast for each in rounds for forecast in each.forecasts]
        _show_forecast(action, forecasts, as_json=as_json and dry_run)
        if dry_run or not forecasts:
            return Exit.OK
        if not yes:
            turn.pause()
            ask(f"{action} {len(forecasts)} branches")
            turn.go_on()
        results: list[dict[str, Any]] = []
        try:
            results += _carry_out(action, rounds)
        finally:  # whoever stops it half-way must know how far it came
            _show_results(results, as_json=as_json)
    return Exit.OK if all(result["done"] for result in results) else Exit.FAILED


class Round:
    """Some branches, and what the dry run says of them."""

    def __init__(self, api: Api, action: str, wanted: dict[str, Any], why: str, branches: list[dict[str, Any]]) -> None:
        self._api = api
        self._order = {"action": action, "reason": why}
        self._filter = wanted
        self._branches = branches
        self._dry = self._forecast()

    @property
    def forecasts(self) -> list[dict[str, Any]]:
        """What it says of each."""
        results: list[dict[str, Any]] = self._dry["results"]
        return results

    def _ids(self) -> list[str]:
        return [branch["id"] for branch in self._branches]

    def _post(self, **more: object) -> dict[str, Any]:
        wanted = {**self._filter, "branch": self._ids()}
        answer: dict[str, Any] = self._api.post("/api/bulk", {**self._order, "filter": wanted, **more})
        return answer

    def _forecast(self) -> dict[str, Any]:
        return self._post(dry_run=True)

    def carry_out(self) -> Iterator[dict[str, Any]]:
        """What became of each. What has changed since it was listed is left alone, and does not stop the others."""
        while self._branches:
            try:
                yield from self._post(dry_run=False, confirm=self._dry["confirm"])["results"]
            except Refused as error:
                if error.status != HTTPStatus.PRECONDITION_FAILED:
                    yield from self._not_done(self._branches, error.sentence)
                    return
            else:
                return
            # Versions only grow: what has the old one after another dry run, had it in that.
            self._dry = self._forecast()
            found = self._api.get("/api/branches", **self._filter, branch=self._ids(), limit=_ROUND)["branches"]
            same = {branch["id"]: branch["version"] for branch in found}
            changed = [branch for branch in self._branches if same.get(branch["id"]) != branch["version"]]
            yield from self._not_done(changed, "it has changed since it was shown")
            self._branches = [branch for branch in self._branches if branch not in changed]
            if changed and self._branches:
                self._dry = self._forecast()

    def _not_done(self, branches: list[dict[str, Any]], why: str) -> Iterator[dict[str, Any]]:
        for branch in branches:
            yield {"xid": branch["xid"], "vhost": branch["vhost"], "answer": why, "done": False}


def _forecast(api: Api, action: str, wanted: dict[str, Any], why: str) -> Iterator[Round]:
    found = list(pages(api, wanted))
    with _progress("looking", len(found)) as advance:
        for start in range(0, len(found), _ROUND):
            some = found[start : start + _ROUND]
            yield Round(api, action, wanted, why, some)
            advance(len(some))


def _carry_out(action: str, rounds: Sequence[Round]) -> Iterator[dict[str, Any]]:
    with _progress(action, sum(len(each.forecasts) for each in rounds)) as advance:
        for each in rounds:
            expected = len(each.forecasts)
            yield from each.carry_out()
            advance(expected)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _show_forecast(action: str, forecasts: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for each in forecasts:
            click.echo(json_line(each))
        return
    if not forecasts:
        click.echo("no branch is meant", err=True)
        return
    for each in forecasts[:_SHOWN]:
        click.echo(f"  {each['xid']}  {safe(each['vhost'])}  {safe(each['answer'])}", err=True)
    if len(forecasts) > _SHOWN:
        click.echo(f"  and {len(forecasts) - _SHOWN} more: --dry-run --json lists them all", err=True)
    said = Counter(_kind(each) for each in forecasts)
    words = ", ".join(f"{count} {word}" for word, count in said.most_common())
    click.echo(f"{action} of {len(forecasts)} branches; told to their transaction managers then: {words}", err=True)


def _kind(result: dict[str, Any]) -> str:
    """What is the same for many: a sentence about one xid is not."""
    answer = str(result["answer"])
    return answer if answer.startswith("xa-") or answer == "404" else "cannot be decided so"


def _show_results(results: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for each in results:
            click.echo(json_line(each))
        return
    failed = [each for each in results if not each["done"]]
    for each in failed[:_SHOWN]:
        click.echo(f"  {each['xid']}  {safe(each['vhost'])}  not done: {safe(each['answer'])}")
    if len(failed) > _SHOWN:
        click.echo(f"  and {len(failed) - _SHOWN} more")
    click.echo(f"{len(results) - len(failed)} of {len(results)} done")
