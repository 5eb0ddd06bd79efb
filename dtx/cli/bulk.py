"""``dtx bulk``: one decision about all branches that a filter finds, each of them shown before."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dtx.admin.safe_text import json_line, safe
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

_ROUND: Final = 250
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
            turn.pause()
            ask(f"{action} {forecast.count} branches")
            turn.go_on()
        results = _Results(as_json=as_json)
        try:
            with _progress(action, forecast.count) as advance:
                for each in rounds:
                    expected = results.under_way = each.count
                    results.add(each.carry_out())
                    results.under_way = 0
                    advance(expected)
        finally:  # whoever stops it half-way must know how far it came
            results.show()
    return Exit.OK if not results.failed else Exit.FAILED


@dataclass(frozen=True, slots=True)
class Meant:
    """A branch as it was listed: of a hundred thousand no more than that is kept.

    Args:
        id, xid, vhost: which.
        version: that it had then.
    """

    id: str
    xid: str
    vhost: str
    version: int

    @classmethod
    def of(cls, listed: Mapping[str, Any]) -> "Meant":
        """As the API lists it."""
        return cls(listed["id"], listed["xid"], listed["vhost"], listed["version"])


class Round:
    """Some branches, which are decided together.

    Args:
        api: decides.
        action: what.
        wanted: the filter that found them.
        why: the reason.
        branches: which.
    """

    def __init__(self, api: Api, action: str, wanted: dict[str, Any], why: str, branches: list[Meant]) -> None:
        self._api = api
        self._order = {"action": action, "reason": why}
        self._filter = wanted
        self._branches = branches
        self._confirm = ""
        self.count = len(branches)
        """How many they are; after the dry run, how many are still meant."""

    def forecast(self) -> list[dict[str, Any]]:
        """What the dry run says of each."""
        answer = self._post(dry_run=True)
        results: list[dict[str, Any]] = answer["results"]
        self._confirm, self.count = answer["confirm"], len(results)
        return results

    def _ids(self) -> list[str]:
        return [branch.id for branch in self._branches]

    def _post(self, **more: object) -> dict[str, Any]:
        wanted = {**self._filter, "branch": self._ids()}
        answer: dict[str, Any] = self._api.post("/api/bulk", {**self._order, "filter": wanted, **more})
        return answer

    def carry_out(self) -> Iterator[dict[str, Any]]:
        """What became of each. What has changed since it was listed is left alone, and does not stop the others."""
        while self._branches:
            try:
                yield from self._post(dry_run=False, confirm=self._confirm)["results"]
            except Refused as error:
                if error.status != HTTPStatus.PRECONDITION_FAILED:
                    yield from self._not_done(self._branches, error.sentence)
                    return
            else:
                return
            # Versions only grow: what has the old one after another dry run, had it in that.
            self.forecast()
            found = self._api.get("/api/branches", **self._filter, branch=self._ids(), limit=_ROUND)["branches"]
            same = {branch["id"]: branch["version"] for branch in found}
            changed = [branch for branch in self._branches if same.get(branch.id) != branch.version]
            yield from self._not_done(changed, "it has changed since it was shown")
            self._branches = [branch for branch in self._branches if branch not in changed]
            if changed and self._branches:
                self.forecast()

    def _not_done(self, branches: list[Meant], why: str) -> Iterator[dict[str, Any]]:
        for branch in branches:
            yield {"xid": branch.xid, "vhost": branch.vhost, "answer": why, "done": False}


def _rounds(api: Api, action: str, wanted: dict[str, Any], why: str) -> list[Round]:
    found: list[Meant] = []
    with _progress("looking", None) as advance:
        for branch in pages(api, wanted):
            found.append(Meant.of(branch))
            advance(1)
    return [Round(api, action, wanted, why, found[start : start + _ROUND]) for start in range(0, len(found), _ROUND)]


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


class _Forecast:
    """What the dry run says: of all branches in numbers, of the first ones in words; for programs, of each at once."""

    def __init__(self, action: str, *, as_json: bool) -> None:
        self._action = action
        self._as_json = as_json
        self._first: list[dict[str, Any]] = []
        self._said: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """How many branches are meant."""
        return self._said.total()

    def add(self, results: Iterable[dict[str, Any]]) -> None:
        """Of some branches."""
        for each in results:
            self._said[_kind(each)] += 1
            if self._as_json:
                click.echo(json_line(each))
            elif len(self._first) < _SHOWN:
                self._first.append(each)

    def show(self) -> None:
        """For people."""
        if self._as_json:
            return
        if not self.count:
            click.echo("no branch is meant", err=True)
            return
        for each in self._first:
            click.echo(f"  {each['xid']}  {safe(each['vhost'])}  {safe(each['answer'])}", err=True)
        if self.count > len(self._first):
            click.echo(f"  and {self.count - len(self._first)} more: --dry-run --json lists them all", err=True)
        words = ", ".join(f"{count} {word}" for word, count in self._said.most_common())
        click.echo(
            f"{self._action} of {self.count} branches; told to their transaction managers then: {words}", err=True
        )


class _Results:
    """What became of the branches, in the same way."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._first: list[dict[str, Any]] = []
        self._count = 0
        self.failed = 0
        """How many were not decided."""
        self.under_way = 0
        """How many have been asked for and not been heard of."""

    def add(self, results: Iterable[dict[str, Any]]) -> None:
        """Of some branches."""
        for each in results:
            self._count += 1
            if self._as_json:
                click.echo(json_line(each))
            if not each["done"]:
                self.failed += 1
                if len(self._first) < _SHOWN:
                    self._first.append(each)

    def show(self) -> None:
        """For people."""
        if self.under_way:
            click.echo(f"up to {self.under_way} more were under way: 'dtx audit' says what became of them", err=True)
        if self._as_json:
            return
        for each in self._first:
            click.echo(f"  {each['xid']}  {safe(each['vhost'])}  not done: {safe(each['answer'])}")
        if self.failed > len(self._first):
            click.echo(f"  and {self.failed - len(self._first)} more")
        click.echo(f"{self._count - self.failed} of {self._count} done")


def _kind(result: dict[str, Any]) -> str:
    """What is the same for many: a sentence about one xid is not."""
    answer = str(result["answer"])
    return answer if answer.startswith("xa-") or answer == "404" else "cannot be decided so"
