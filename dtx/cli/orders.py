"""``dtx commit``, ``rollback``, ``forget`` and ``retry``: what operators decide, at the command line."""

import asyncio
import json
from typing import Any

import click

from dtx.cli.api import address_of, order_path, post, token_for, user_name
from dtx.cli.connect import database_at_hand
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import BROKER_SETTINGS, DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.cli.text import json_line
from dtx.config import Settings
from dtx.xa.xid import Xid

_ABOUT = {
    "commit": """Commit a prepared branch heuristically, since its transaction manager will not decide.

    What it published is seen at once, what it consumed is gone for good. The transaction manager is told xa-heurcom
    when it comes after all, until the outcome is forgotten.""",
    "rollback": """Roll a prepared branch back heuristically, since its transaction manager will not decide.

    What it consumed returns to its queues. What it published is kept, seen by nobody, and goes to the archive with
    forget. The transaction manager is told xa-heurrb when it comes after all, until the outcome is forgotten.""",
    "forget": """Forget a heuristic outcome, once everybody who has to know it does.

    Messages that nobody got go to the archive.""",
    "retry": """Try again what a decided branch is stuck with: it ends as it was decided.""",
}
_EPILOG = """\b
Examples:
  dtx in-doubt --state prepared --older-than 1h
  dtx rollback 1:6774:62 --dry-run
  dtx rollback 1:6774:62 --reason "order service lost its log, see ticket 4711"

A running dtx is asked by its API (--api, else the address of --admin-listen), with the token of --token or DTX_TOKEN;
without one, whoever can open the database gets one for the moment. Where no dtx runs, the order is carried out here:
that needs --broker where the messages are in a broker. It is refused while another dtx has the lease.
"""


def _command(action: str) -> click.Command:
    @click.command(action, cls=SettingsCommand, help=_ABOUT[action], epilog=_EPILOG)
    @with_settings(*DATABASE_SETTINGS, *BROKER_SETTINGS, "admin_listen")
    @click.argument("xid")
    @click.option("--vhost", default="/", show_default=True, metavar="VHOST", help="The virtual host of the branch.")
    @click.option("--reason", metavar="TEXT", help="Why; for journal and trail. Needed unless it is a dry run.")
    @click.option("--version", "version", type=int, metavar="NUMBER", help="Refuse where the branch has another one.")
    @click.option("--dry-run", is_flag=True, help="Say what would happen, and do nothing.")
    @click.option("--yes", is_flag=True, help="Do not ask.")
    @click.option("--json", "as_json", is_flag=True, help="The answer as one JSON object; does not ask.")
    @click.option("--api", metavar="URL", help="Address of the API; default that of --admin-listen.")
    @click.option("--token", envvar="DTX_TOKEN", metavar="TOKEN", help="For the API; better given as DTX_TOKEN.")
    def run(
        settings: Settings,
        xid: str,
        vhost: str,
        reason: str | None,
        version: int | None,
        dry_run: bool,
        yes: bool,
        as_json: bool,
        api: str | None,
        token: str | None,
    ) -> int:
        try:
            Xid.parse(xid)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="XID") from None
        if not reason and not dry_run:
            raise click.UsageError("--reason is needed: it is what the next one will want to know")
        order = {"reason": reason or "dry run"} | ({} if version is None else {"version": version})
        with database_at_hand(settings) as url:
            ask = _Asker(settings, url, api, token, action, xid, vhost)
            forecast = ask(order | {"dry_run": True})
            if dry_run:
                _show(forecast, as_json=as_json)
                return Exit.OK
            if not yes and not as_json:
                _show(forecast, as_json=False)
                click.confirm(f"{action} {xid}?", abort=True)
            # What was shown is what is done, or nothing.
            done = ask(order | {"version": forecast["forecast"]["version"]})
            _show(done, as_json=as_json)
        return Exit.OK

    return run


class _Asker:
    """Gives orders to the API of the active dtx, or carries them out where there is none."""

    def __init__(
        self, settings: Settings, url: str, api: str | None, token: str | None, action: str, xid: str, vhost: str
    ) -> None:
        self._settings = settings
        self._url = url
        self._api = api or address_of(settings)
        self._token = token
        self._action = action
        self._xid = xid
        self._vhost = vhost

    def __call__(self, order: dict[str, Any]) -> dict[str, Any]:
        from dtx.log.reading import LogReader

        with LogReader(self._url) as log:
            active = any(lease.rm == self._settings.rm and lease.remaining > 0 for lease in log.leases())
        if active:
            with token_for(self._settings, self._url, self._token) as token:
                answer: dict[str, Any] = post(self._api, token, order_path(self._xid, self._action, self._vhost), order)
            return answer
        return asyncio.run(self._alone(order))

    async def _alone(self, form: dict[str, Any]) -> dict[str, Any]:
        from dtx.admin.forms import DoneForm, ForecastForm
        from dtx.log.operators import OperatorLog
        from dtx.manager.operators import Action, Done, Order
        from dtx.server.alone import carry_out
        from dtx.xa.codes import XaError

        trail = OperatorLog(self._url, self._settings.rm)
        order = Order(
            vhost=self._vhost,
            xid=Xid.parse(self._xid),
            action=Action(self._action),
            actor=user_name(),
            reason=form["reason"],
            version=form.get("version"),
        )
        number = await asyncio.to_thread(
            lambda: trail.begin(
                actor=order.actor,
                role="database",
                address="command line",
                action=order.action,
                subject=f"{self._vhost} {self._xid}",
                reason=order.reason,
                detail=json.dumps(form),
            )
        )
        try:
            done = await carry_out(self._settings, self._url, order, dry_run=form.get("dry_run", False))
        except XaError as error:
            await asyncio.to_thread(trail.finish, number, str(error))
            raise CommandError(Exit.FAILED, error.reason) from None
        if isinstance(done, Done):
            await asyncio.to_thread(trail.finish, number, done.answer)
            return DoneForm.of(done).model_dump(mode="json")
        await asyncio.to_thread(trail.finish, number, "dry run")
        return DoneForm(dry_run=True, forecast=ForecastForm.of(done)).model_dump(mode="json")


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json_line(answer))
        return
    forecast = answer["forecast"]
    for message in forecast["messages"]:
        where = (
            message["queue"] if message["kind"] == "consume" else f"{message['exchange']!r}, {message['routing_key']!r}"
        )
        click.echo(f"  {message['position']:>5}  {message['kind']:<8} {message['fate'] or 'moved':<10} {where}")
    ends = "leaves the log" if forecast["becomes"] == "unknown" else f"becomes {forecast['becomes']}"
    click.echo(f"the branch is {forecast['state']} (version {forecast['version']}) and {ends}")
    if forecast["told"].startswith("xa-"):
        click.echo(f"its transaction manager is told {forecast['told']}")
    if forecast["archived"]:
        click.echo(f"{forecast['archived']} message(s) that nobody got are kept for the archive")
    if not answer["dry_run"]:
        click.echo(f"done: {answer['answer']}")


commit = _command("commit")
rollback = _command("rollback")
forget = _command("forget")
retry = _command("retry")
