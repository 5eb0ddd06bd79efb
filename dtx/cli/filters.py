"""Which branches are meant: one set of flags for every command about many."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar

import click

from dtx.cli.options import duration
from dtx.log.listing import Wanted, gtrid_pattern
from dtx.log.records import LogState

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NAMES: Final = ("state", "vhost", "owner", "older_than", "format_id", "gtrid", "queue", "exchange", "stuck")

ABOUT: Final = """\b
States: taking (consumed messages are being taken over, not yet a vote), prepared (waits for its transaction manager),
committing and rolling-back (decided, under way), heuristic-committing and heuristic-rolling-back (the same, decided by
an operator), heuristic (completed without its transaction manager, until forget).
--queue finds what publishes to a queue where the log knows that: without a broker always, with one through the default
exchange. A gtrid is text, or octets as hex:6f72646572; either with * for any number of octets: 'order-*', 'hex:6f72*'.
"""


def _gtrid(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    try:
        if value is not None:
            gtrid_pattern(value)
    except ValueError as error:
        raise click.BadParameter(f"what follows hex: is hexadecimal, and *: {error}") from None
    return value


def wanted_of(given: Mapping[str, Any]) -> Wanted:
    """The API's filter in terms of the log, as the API itself understands it."""
    words = dict(given)
    words["states"] = tuple(map(LogState, words.pop("state", ())))
    if "gtrid" in words:
        words["gtrid"] = gtrid_pattern(words["gtrid"])
    for name in ("queue", "exchange"):
        if name in words:
            words[name] = words[name].encode()
    return Wanted(**words)


_OPTIONS: Final = (
    click.option(
        "--state", multiple=True, type=click.Choice([str(state) for state in LogState]),
        help="Only in this state; can be repeated.",
    ),
    click.option("--vhost", metavar="VHOST", help="Only in this virtual host."),
    click.option("--owner", metavar="USER", help="Only those that this user started."),
    click.option("--older-than", callback=duration, metavar="DURATION", help="Only those that are as old."),
    click.option("--format-id", type=click.IntRange(0, 0xFFFFFFFF), metavar="NUMBER", help="Only with this format id."),
    click.option("--gtrid", callback=_gtrid, metavar="PATTERN", help="Only of these global transactions: 'order-*'."),
    click.option("--queue", metavar="QUEUE", help="Only those that consumed from it or publish to it."),
    click.option("--exchange", metavar="EXCHANGE", help="Only those that publish to it; '' is the default exchange."),
    click.option("--stuck/--not-stuck", default=None, help="Only those that phase two is stuck with, or is not."),
)  # fmt: skip


def with_filter(function: _Function) -> _Function:
    """Give a command these flags; it is called with ``wanted``: a dictionary as the API's filter, of what was given."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in _NAMES}
        wanted = {
            name: list(value) if name == "state" else value for name, value in given.items() if value not in (None, ())
        }
        return function(*args, wanted=wanted, **kwargs)

    command: Any = run
    for option in reversed(_OPTIONS):
        command = option(command)
    decorated: _Function = command
    return decorated
