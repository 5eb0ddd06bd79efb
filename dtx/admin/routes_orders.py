"""Routes for orders, and policies. The audit log records every order before it begins, permitted or not.

The decision of a policy takes the same way as the order of an operator, with audit log and check of the version.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Final, Literal
from uuid import UUID

from fastapi import APIRouter, Path

from dtx.admin import forms
from dtx.admin.api_context import API, ApiContext, Asker, ConnectionNumber, Context, LoginFirstRoute, Vhost, XidPath
from dtx.admin.identity import Identity
from dtx.admin.problems import NOT_ACTIVE, UNKNOWN_OUTCOME, Problem, as_problem, refusals
from dtx.admin.routes_read import ArchivedPosition, BranchId, client_of, wanted_of, xid_of
from dtx.auth.roles import OperatorRole
from dtx.config.rules import Policy
from dtx.log import reader
from dtx.log.membership import rotate_secret
from dtx.log.pages import InDoubt, branch_page, duplicates
from dtx.log.reader import AgedBranch
from dtx.log.records import Redirect
from dtx.manager.operators import OperatorAction, Order
from dtx.manager.policies import Policies
from dtx.xa.codes import ReplyCode, XaError

router = APIRouter(prefix=API, route_class=LoginFirstRoute)
_ORDER: Final = refusals(
    {
        HTTPStatus.BAD_REQUEST: "The xid is malformed.",
        HTTPStatus.NOT_FOUND: "No such branch is in the log.",
        HTTPStatus.CONFLICT: "The order is not possible in the state of the branch.",
        HTTPStatus.PRECONDITION_FAILED: "The branch has another version, or no such unfinished messages.",
        HTTPStatus.SERVICE_UNAVAILABLE: UNKNOWN_OUTCOME,
    }
)
_BULK: Final = refusals(
    {
        HTTPStatus.BAD_REQUEST: "A state or the gtrid of the filter is malformed.",
        HTTPStatus.CONFLICT: "The filter finds more than 1,000 branches, or the order is not that of the dry run.",
        HTTPStatus.PRECONDITION_FAILED: "The branches have changed since the dry run.",
        HTTPStatus.PRECONDITION_REQUIRED: "The order needs the *confirm* of a dry run.",
        HTTPStatus.SERVICE_UNAVAILABLE: NOT_ACTIVE,
    }
)
_RESTORE: Final = refusals(
    {
        HTTPStatus.NOT_FOUND: "The log has no such copy.",
        HTTPStatus.PRECONDITION_FAILED: "The queue is gone, or refuses the message.",
        HTTPStatus.SERVICE_UNAVAILABLE: UNKNOWN_OUTCOME,
    }
)
_CLOSE: Final = refusals(
    {HTTPStatus.NOT_FOUND: "There is no such connection.", HTTPStatus.SERVICE_UNAVAILABLE: NOT_ACTIVE}
)
MOST_AT_ONCE: Final = 1000
"""Branches of one bulk order: few enough to be read by a person, and to be completed within a minute."""
_SIDE_BY_SIDE: Final = 16
ACTOR: Final = "policy:"
"""Prefix of the actors of policies. Names of users have no colon; tokens have the prefix ``token:``."""


@router.post("/branches/{xid}/discard", tags=["orders"], responses=_ORDER)
async def discard(
    who: Asker, context: Context, xid: XidPath, form: forms.DiscardForm, vhost: Vhost = "/"
) -> forms.DoneForm:
    """Discard messages that phase two cannot publish. The next commit, rollback or retry publishes the others."""
    order = _order(who, OperatorAction.DISCARD, xid, vhost, form, positions=tuple(form.positions))
    return await _carry_out(context, who, order, form)


@router.post("/branches/{xid}/redirect", tags=["orders"], responses=_ORDER)
async def redirect(
    who: Asker, context: Context, xid: XidPath, form: forms.RedirectForm, vhost: Vhost = "/"
) -> forms.DoneForm:
    """Give a message that phase two cannot publish another exchange and routing key, for the next commit, rollback or
    retry.
    """
    to = Redirect(
        position=form.position,
        exchange=form.exchange.encode(),
        routing_key=form.routing_key.encode(),
        queue=None if form.queue is None else form.queue.encode(),
    )
    return await _carry_out(context, who, _order(who, OperatorAction.REDIRECT, xid, vhost, form, redirect=to), form)


@router.post("/branches/{xid}/{action}", tags=["orders"], responses=_ORDER)
async def decide(
    who: Asker,
    context: Context,
    xid: XidPath,
    action: Annotated[Literal["commit", "rollback", "forget", "retry"], Path(description="The order.")],
    form: forms.OrderForm,
    vhost: Vhost = "/",
) -> forms.DoneForm:
    """Commit or roll back a prepared branch heuristically, forget a heuristic outcome, or retry a stuck branch."""
    return await _carry_out(context, who, _order(who, OperatorAction(action), xid, vhost, form), form)


def _order(
    who: Identity,
    action: OperatorAction,
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


async def _carry_out(context: ApiContext, who: Identity, order: Order, form: forms.OrderForm) -> forms.DoneForm:
    async def work() -> tuple[str, forms.DoneForm]:
        who.require(OperatorRole.OPERATOR)
        _, operators = context.require_active()
        if form.dry_run:
            forecast = forms.ForecastForm.of_forecast(await operators.forecast(order))
            return "dry run", forms.DoneForm(dry_run=True, forecast=forecast)
        done = await operators.carry_out(order)
        context.metrics.orders[order.action].inc()
        return done.answer, forms.DoneForm.of_done(done)

    detail = form.model_dump(exclude={"reason"}, exclude_none=True)
    return await context.audited(who, order.action, f"{order.vhost} {order.xid}", order.reason, detail, work)


@router.post("/duplicates/{branch}/{position}/restore", tags=["orders"], responses=_RESTORE)
async def restore(
    who: Asker, context: Context, branch: BranchId, position: ArchivedPosition, form: forms.RestoreForm
) -> forms.DuplicateForm:
    """Publish a second copy that dtx did not deliver to its queue. Consumers get it as a message that was put back."""

    async def work() -> tuple[str, forms.DuplicateForm]:
        who.require(OperatorRole.OPERATOR)
        active, _ = context.require_active()
        found = await context.read(
            lambda log: duplicates(
                log, context.rm, vhost=form.vhost, queue=form.queue.encode(), branch_id=branch, position=position,
                limit=1, contents=True,
            )
        )  # fmt: skip
        if not found:
            raise Problem(HTTPStatus.NOT_FOUND, f"the log has no second copy of {branch}/{position} in this queue")
        if active.broker is None:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "only a running dtx can publish a message")
        await active.broker.restore(found[0].duplicate)
        return "restored", forms.DuplicateForm.of_row(found[0])

    detail = {"vhost": form.vhost, "queue": form.queue}
    return await context.audited(who, "restore", f"duplicate {branch}/{position}", form.reason, detail, work)


@router.post("/members/rotate-secret", tags=["service"])
async def rotate_member_secret(who: Asker, context: Context, form: forms.RotationForm) -> list[forms.MemberForm]:
    """Change the secret that members prove to each other. The last one stays valid until the next rotation."""

    async def work() -> tuple[str, list[forms.MemberForm]]:
        who.require(OperatorRole.COORDINATOR)
        await asyncio.to_thread(rotate_secret, context.url, context.rm)
        found = await context.read(lambda log: log.members(context.rm))
        return "rotated", [forms.MemberForm.of_row(row) for row in found]

    return await context.audited(who, "rotate-secret", "members", form.reason, {}, work)


@router.post("/bulk", tags=["orders"], responses=_BULK)
async def decide_many(who: Asker, context: Context, form: forms.BulkForm) -> forms.BulkAnswer:
    """Run one order on all branches that a filter finds, at most 1000. Without *dry_run* it needs the dry run's
    answer.

    Each branch is decided on its own, in the version of the dry run. Branches that have changed since are left out.
    """

    async def work() -> tuple[str, forms.BulkAnswer]:
        who.require(OperatorRole.COORDINATOR)
        context.require_active()
        wanted = wanted_of(form.filter, context.rm)
        order = hashlib.sha256(f"{form.action} {form.filter.model_dump_json()}".encode()).hexdigest()[:16]
        if not form.dry_run and form.confirm is None:
            raise Problem(HTTPStatus.PRECONDITION_REQUIRED, "a dry run is needed first: the order needs its confirm")
        if not form.dry_run and not str(form.confirm).startswith(order):
            raise Problem(HTTPStatus.CONFLICT, "the order is not the one of the dry run: run the dry run again")
        found = await context.read(lambda log: branch_page(log, wanted, limit=MOST_AT_ONCE + 1))
        if len(found) > MOST_AT_ONCE:
            detail = f"more than {MOST_AT_ONCE} branches match: narrow the filter"
            raise Problem(HTTPStatus.CONFLICT, detail)
        confirm = order + _fingerprint(found)
        if not form.dry_run and form.confirm != confirm:
            raise Problem(
                HTTPStatus.PRECONDITION_FAILED, "the branches have changed since the dry run: run the dry run again"
            )
        results = await _many(context, who, form, found)
        done = sum(result.done for result in results)
        summary = "dry run" if form.dry_run else f"{done} of {len(results)} done"
        return summary, forms.BulkAnswer(dry_run=form.dry_run, confirm=confirm, branches=len(results), results=results)

    detail = form.model_dump(mode="json", exclude={"reason"}, exclude_none=True)
    return await context.audited(who, f"bulk-{form.action}", "branches", form.reason, detail, work)


def _fingerprint(found: list[InDoubt]) -> str:
    digest = hashlib.sha256()
    for item in found:
        digest.update(item.branch.id.bytes + item.branch.version.to_bytes(8))
    return digest.hexdigest()[:32]


async def _many(
    context: ApiContext, who: Identity, form: forms.BulkForm, found: list[InDoubt]
) -> list[forms.BulkResult]:
    _, operators = context.require_active()
    slots = asyncio.Semaphore(_SIDE_BY_SIDE)

    async def one(item: InDoubt) -> forms.BulkResult:
        branch = item.branch
        order = Order(
            vhost=branch.vhost,
            xid=branch.xid,
            action=OperatorAction(form.action),
            actor=who.name,
            reason=form.reason,
            version=branch.version,
        )
        place = {"xid": str(branch.xid), "vhost": branch.vhost}
        answer = None
        async with slots:
            try:
                if form.dry_run:
                    forecast = await operators.forecast(order)
                    answer = forecast.later_answer
                else:
                    done = await operators.carry_out(order)
                    forecast, answer = done.forecast, done.answer
                    context.metrics.orders[order.action].inc()
                fates = Counter(str(step.fate or "redirected") for step in forecast.steps)
                return forms.BulkResult.of(forecast, **place, answer=answer, done=not form.dry_run, fates=fates)
            except Exception as error:  # noqa: BLE001 - one branch that cannot be decided stops no other
                problem = as_problem(error)
                if form.dry_run or answer is None:
                    return forms.BulkResult(**place, answer=problem.detail, done=False)
                return forms.BulkResult(**place, answer=answer, done=True)  # with an error only in showing it

    return list(await asyncio.gather(*map(one, found)))


@router.post("/connections/{number}/close", tags=["clients"], status_code=202, responses=_CLOSE)
async def close_connection(
    who: Asker, context: Context, number: ConnectionNumber, form: forms.DisconnectForm
) -> forms.ConnectionForm:
    """Close a client connection (320). Its branches are treated as if the client had disconnected."""

    async def work() -> tuple[str, forms.ConnectionForm]:
        who.require(OperatorRole.OPERATOR)
        client, arrival = client_of(context, number)
        (was,) = await forms.ConnectionForm.of_clients([(client, arrival)])
        context.require_active()[0].disconnect(client, form.reason)
        return f"closed, it was {was.user} from {was.address}", was

    return await context.audited(who, "disconnect", f"connection {number}", form.reason, {}, work)


class _Log:
    """The ages of branches, read from the log through the context."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def clock(self) -> float:
        return await self._context.read(reader.database_time)

    async def of_ids(self, ids: Sequence[UUID]) -> list[AgedBranch]:
        return await self._context.read(lambda log: reader.prepared_of_ids(log, self._context.rm, ids))

    async def older_than(self, seconds: float, limit: int) -> tuple[int, list[AgedBranch]]:
        return await self._context.read(lambda log: reader.prepared_longer(log, self._context.rm, seconds, limit=limit))


def start_policies(context: ApiContext, policies: Sequence[Policy], alert_after: float) -> asyncio.Task[None]:
    """Start the task that applies *policies* to the branches of the active dtx; cancel the task to end it.

    Args:
        context: must be activated.
        policies: the policies of the settings.
        alert_after: age in seconds after which a prepared branch is reported; 0 for never.
    """
    active = context.active
    assert active is not None, "policies are for the active dtx"

    async def decide(policy: Policy, found: AgedBranch) -> str:
        who = Identity(name=f"{ACTOR}{policy.name}", role=OperatorRole.OPERATOR, address="")
        order = Order(
            vhost=found.vhost,
            xid=found.xid,
            action=OperatorAction(policy.action),
            actor=who.name,
            reason=f"policy {policy.name}: prepared for {found.age:.0f} s, limit {policy.after:.0f} s",
            version=found.version,
        )

        async def work() -> tuple[str, str]:
            _, operators = context.require_active()
            done = await operators.carry_out(order)
            context.metrics.orders[order.action].inc()
            return done.answer, done.answer

        detail = {"policy": str(policy), "version": found.version}
        try:
            return await context.audited(who, order.action, f"{order.vhost} {order.xid}", order.reason, detail, work)
        except Problem as problem:
            raise XaError(ReplyCode.INTERNAL_ERROR, problem.detail) from problem

    watch = Policies(
        policies,
        alert_after,
        active.manager.entries,
        lambda: active.lease_valid() and not active.manager.draining,
        _Log(context),
        decide,
        context.metrics,
    )
    return asyncio.get_running_loop().create_task(watch.watch(), name="dtx-policies")
