"""The routes that give orders. Each is written to the trail before it begins, whether it is allowed or not."""

import asyncio
import hashlib
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from dtx.admin import forms
from dtx.admin.desk import Desk
from dtx.admin.identity import Identity
from dtx.admin.looking import Asker, TheDesk, Vhost, wanted_of, xid_of
from dtx.admin.problems import Problem, as_problem
from dtx.log.listing import page
from dtx.log.operator_tables import Role
from dtx.log.reading import InDoubt
from dtx.log.records import Redirect
from dtx.manager.operators import Action, Order

router = APIRouter(prefix="/api")
MOST_AT_ONCE = 1000
"""Branches of one bulk order: what a person can look through, and what is done in a minute."""
_SIDE_BY_SIDE = 16


@router.post("/branches/{xid}/discard", tags=["orders"])
async def discard(who: Asker, desk: TheDesk, xid: str, form: forms.DiscardForm, vhost: Vhost = "/") -> forms.DoneForm:
    """Give up messages that phase two is stuck with. What is left goes on with the next commit, rollback or retry."""
    order = _order(who, Action.DISCARD, xid, vhost, form, positions=tuple(form.positions))
    return await _carry_out(desk, who, order, form)


@router.post("/branches/{xid}/redirect", tags=["orders"])
async def redirect(who: Asker, desk: TheDesk, xid: str, form: forms.RedirectForm, vhost: Vhost = "/") -> forms.DoneForm:
    """Send a message that phase two is stuck with elsewhere; it goes there with the next commit, rollback or retry."""
    to = Redirect(
        position=form.position,
        exchange=form.exchange.encode(),
        routing_key=form.routing_key.encode(),
        queue=None if form.queue is None else form.queue.encode(),
    )
    return await _carry_out(desk, who, _order(who, Action.REDIRECT, xid, vhost, form, redirect=to), form)


@router.post("/branches/{xid}/{action}", tags=["orders"])
async def decide(
    who: Asker,
    desk: TheDesk,
    xid: str,
    action: Literal["commit", "rollback", "forget", "retry"],
    form: forms.OrderForm,
    vhost: Vhost = "/",
) -> forms.DoneForm:
    """Commit or roll back a prepared branch heuristically, forget a heuristic outcome, or retry what is stuck."""
    return await _carry_out(desk, who, _order(who, Action(action), xid, vhost, form), form)


def _order(
    who: Identity,
    action: Action,
    xid: str,
    vhost: str,
    form: forms.OrderForm,
    *,
    positions: tuple[int, ...] = (),
    redirect: Redirect | None = None,
) -> Order:
    return Order(
        vhost=vhost,
        xid=xid_of(xid),
        action=action,
        actor=who.name,
        reason=form.reason,
        version=form.version,
        positions=positions,
        redirect=redirect,
    )


async def _carry_out(desk: Desk, who: Identity, order: Order, form: forms.OrderForm) -> forms.DoneForm:
    async def work() -> tuple[str, forms.DoneForm]:
        who.require(Role.OPERATOR)
        _, operators = desk.require_active()
        if form.dry_run:
            forecast = forms.ForecastForm.of(await operators.forecast(order))
            return "dry run", forms.DoneForm(dry_run=True, forecast=forecast)
        done = await operators.carry_out(order)
        desk.metrics.orders[order.action].inc()
        return done.answer, forms.DoneForm.of(done)

    detail = form.model_dump(exclude={"reason"}, exclude_none=True)
    return await desk.audited(who, order.action, f"{order.vhost} {order.xid}", order.reason, detail, work)


@router.post("/bulk", tags=["orders"])
async def decide_many(who: Asker, desk: TheDesk, form: forms.BulkForm) -> forms.BulkAnswer:
    """An order about all branches that a filter finds, 1000 at most: without *dry_run* it takes what the dry run said.

    Each branch is decided on its own, in the version that the dry run saw; what has changed since is left alone.
    """

    async def work() -> tuple[str, forms.BulkAnswer]:
        who.require(Role.COORDINATOR)
        desk.require_active()
        wanted = wanted_of(form.filter)
        order = hashlib.sha256(f"{form.action} {form.filter.model_dump_json()}".encode()).hexdigest()[:16]
        if not form.dry_run and form.confirm is None:
            raise Problem(HTTPStatus.PRECONDITION_REQUIRED, "the dry run comes first: the order needs its confirm")
        if not form.dry_run and not str(form.confirm).startswith(order):
            raise Problem(HTTPStatus.CONFLICT, "the order is not the one of the dry run: run that again")
        found = await desk.read(lambda log: page(log, desk.rm, wanted, limit=MOST_AT_ONCE + 1))
        if len(found) > MOST_AT_ONCE:
            detail = f"more than {MOST_AT_ONCE} branches are meant: narrow the filter"
            raise Problem(HTTPStatus.CONFLICT, detail)
        confirm = order + _fingerprint(found)
        if not form.dry_run and form.confirm != confirm:
            raise Problem(HTTPStatus.PRECONDITION_FAILED, "the branches are not those of the dry run: look again")
        results = await _many(desk, who, form, found)
        done = sum(result.done for result in results)
        said = "dry run" if form.dry_run else f"{done} of {len(results)} done"
        return said, forms.BulkAnswer(dry_run=form.dry_run, confirm=confirm, branches=len(results), results=results)

    detail = form.model_dump(mode="json", exclude={"reason"}, exclude_none=True)
    return await desk.audited(who, f"bulk-{form.action}", "branches", form.reason, detail, work)


def _fingerprint(found: list[InDoubt]) -> str:
    digest = hashlib.sha256()
    for item in found:
        digest.update(item.branch.id.bytes + item.branch.version.to_bytes(8))
    return digest.hexdigest()[:32]


async def _many(desk: Desk, who: Identity, form: forms.BulkForm, found: list[InDoubt]) -> list[forms.BulkResult]:
    _, operators = desk.require_active()
    turn = asyncio.Semaphore(_SIDE_BY_SIDE)

    async def one(item: InDoubt) -> forms.BulkResult:
        branch = item.branch
        order = Order(
            vhost=branch.vhost,
            xid=branch.xid,
            action=Action(form.action),
            actor=who.name,
            reason=form.reason,
            version=branch.version,
        )
        async with turn:
            try:
                if form.dry_run:
                    answer = (await operators.forecast(order)).told
                else:
                    answer = (await operators.carry_out(order)).answer
                    desk.metrics.orders[order.action].inc()
            except Exception as error:  # noqa: BLE001 - one branch that cannot be decided stops no other
                problem = as_problem(error)
                return forms.BulkResult(xid=str(branch.xid), vhost=branch.vhost, answer=problem.detail, done=False)
        return forms.BulkResult(xid=str(branch.xid), vhost=branch.vhost, answer=answer, done=not form.dry_run)

    return list(await asyncio.gather(*map(one, found)))


@router.get("/tokens", tags=["operators"])
async def list_tokens(who: Asker, desk: TheDesk) -> list[forms.TokenForm]:
    """Tokens, without their secrets."""
    who.require(Role.COORDINATOR)
    return [
        forms.TokenForm(
            name=token.name,
            role=token.role,
            made_by=token.made_by,
            made_at=forms.moment(token.made_at),
            expires_at=forms.moment(token.expires_at),
        )
        for token in await asyncio.to_thread(desk.trail.tokens)
    ]


@router.post("/tokens", tags=["operators"], status_code=201)
async def make_token(who: Asker, desk: TheDesk, form: forms.NewToken) -> forms.MadeToken:
    """Make a token; its secret is told this once."""

    async def work() -> tuple[str, forms.MadeToken]:
        who.require(Role.COORDINATOR)
        secret = await asyncio.to_thread(
            lambda: desk.trail.make_token(form.name, Role(form.role), who.name, seconds=form.seconds)
        )
        return "made", forms.MadeToken(name=form.name, role=form.role, secret=secret)

    detail = form.model_dump(exclude={"name", "reason"}, exclude_none=True)
    return await desk.audited(who, "make-token", form.name, form.reason, detail, work)


@router.delete("/tokens/{name:path}", tags=["operators"], status_code=204)
async def revoke_token(
    who: Asker, desk: TheDesk, name: str, reason: Annotated[str, Query(max_length=2000)] = ""
) -> None:
    """Revoke a token: from now on it permits nothing."""

    async def work() -> tuple[str, None]:
        who.require(Role.COORDINATOR)
        await asyncio.to_thread(desk.trail.revoke_token, name)
        return "revoked", None

    await desk.audited(who, "revoke-token", name, reason, {}, work)
