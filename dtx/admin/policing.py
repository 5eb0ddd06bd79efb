"""Policies at the operators' desk: what one decides goes the way of a person's order, trail and version included."""

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from dtx.admin.desk import Desk
from dtx.admin.identity import Identity
from dtx.admin.problems import Problem
from dtx.config.rules import Policy
from dtx.log import due
from dtx.log.due import Due
from dtx.log.operator_tables import Role
from dtx.manager.operators import Action, Order
from dtx.manager.policies import Policies
from dtx.xa.codes import ReplyCode, XaError


class _Log:
    """Ages, as the desk reads the log."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def clock(self) -> float:
        return await self._desk.read(due.clock)

    async def of_ids(self, ids: Sequence[UUID]) -> list[Due]:
        return await self._desk.read(lambda log: due.of_ids(log, self._desk.rm, ids))

    async def older_than(self, seconds: float, limit: int) -> tuple[int, list[Due]]:
        return await self._desk.read(lambda log: due.older_than(log, self._desk.rm, seconds, limit=limit))


ACTOR: Final = "policy:"
"""What the names of those who decide begin with; neither users nor tokens have a colon in theirs, but ``token:``."""


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s"


def police(desk: Desk, policies: Sequence[Policy], alert_after: float) -> asyncio.Task[None]:
    """Let *policies* look after the branches of the active dtx at *desk*; the task ends when it is cancelled.

    Args:
        desk: activated.
        policies: what is decided.
        alert_after: seconds after which a prepared branch is told of; 0 for never.
    """
    active = desk.active
    assert active is not None, "policies are for the active dtx"

    async def decide(policy: Policy, found: Due) -> str:
        who = Identity(name=f"{ACTOR}{policy.name}", role=Role.OPERATOR, address="")
        order = Order(
            vhost=found.vhost,
            xid=found.xid,
            action=Action(policy.action),
            actor=who.name,
            reason=f"policy {policy.name}: prepared for {_seconds(found.age)}, limit {_seconds(policy.after)}",
            version=found.version,
        )

        async def work() -> tuple[str, str]:
            _, operators = desk.require_active()
            done = await operators.carry_out(order)
            desk.metrics.orders[order.action].inc()
            return done.answer, done.answer

        detail = {"policy": str(policy), "version": found.version}
        try:
            return await desk.audited(who, order.action, f"{order.vhost} {order.xid}", order.reason, detail, work)
        except Problem as problem:
            raise XaError(ReplyCode.INTERNAL_ERROR, problem.detail) from problem

    watch = Policies(
        policies,
        alert_after,
        active.manager.entries,
        lambda: active.lease_valid() and not active.manager.draining,
        _Log(desk),
        decide,
        desk.metrics,
    )
    return asyncio.get_running_loop().create_task(watch.watch(), name="dtx-policies")
