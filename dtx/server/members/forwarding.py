"""Requests for branches that other members have.

Theory of operation. The log names the member of every branch that has voted. A branch that has not voted is in the
memory of one member only. So a request for an xid that neither the memory here nor the log has goes to all members, and
the log is read once more afterwards: the branch may have voted and ended in between. Only then is the answer 404.

A request makes one hop. A member that does not have the branch says so, and the sender begins again. It also begins
again while the member does not answer, and as long as there is time: that member may be gone, and another one takes its
branches. Without an answer in time the outcome is not known, and the answer is 541.

If the answer to a request is lost, the request is not sent again: it may be under way, or done. The log decides,
because it has the ending of the branch, or will have it soon. Without an ending in time, the answer is 541.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final
from uuid import UUID

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.api import LogError
from dtx.log.membership import Member, Membership
from dtx.manager import BranchManager, Requester
from dtx.manager.branches import Elsewhere
from dtx.manager.operators import Operators, from_json
from dtx.manager.unvoted import UnvotedFilter, UnvotedPage, unvoted_page
from dtx.server.members.client import PeerClient, PeerLost, PeerUnreachable
from dtx.telemetry import Metrics
from dtx.xa.codes import RefusalCause, ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid

_PAUSE: Final = 0.1
"""Seconds before a request begins again."""
_GRACE: Final = 5.0
"""Seconds for an answer to come, in addition to the time that the work may take."""
_LISTED_WITHIN: Final = 2.0
"""Seconds in which a member must list branches for operators."""
_ELSEWHERE: Final = {"elsewhere": True}
_FORWARDED: Final = frozenset(
    {
        Operation.PREPARE, Operation.COMMIT, Operation.ONE_PHASE, Operation.ROLLBACK, Operation.FORGET,
        Operation.GET_TIMEOUT, Operation.SET_TIMEOUT,
    }
)  # fmt: skip
_REPEATABLE: Final = (Operation.GET_TIMEOUT, Operation.SET_TIMEOUT)
"""Requests that are sent again if their answer is lost."""

Answer = dict[str, Any] | PeerUnreachable | PeerLost | None
"""The answer of a member, or why there is none; ``None`` if it does not have the branch."""


class Forwarding:
    """Sends requests to the members that have their branches, and handles those of other members.

    Args:
        manager: of this member.
        membership: of this member; knows the others.
        tls: for connections to other members.
        metrics: counts the requests.
    """

    def __init__(self, manager: BranchManager, membership: Membership, tls: ssl.SSLContext, metrics: Metrics) -> None:
        self._metrics = metrics
        self._manager = manager
        self._operators = Operators(manager)
        self._membership = membership
        self._tls = tls
        self._clients: dict[UUID, PeerClient] = {}
        self.on_copies: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]] | None = None
        """Answers the others about second copies of messages."""

    async def close(self) -> None:
        """Close the connections to other members."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def ask_others(
        self, request: Mapping[str, Any], seconds: float, but: Collection[UUID] = ()
    ) -> list[tuple[Member, Answer]]:
        """Send *request* to all members, except those in *but*. Returns each member with its answer.

        Raises:
            LogUnavailable: the members cannot be read.
        """
        others = [member for member in await self._members(None) if member.instance not in but]
        answers = await asyncio.gather(*(self._ask(member, request, seconds) for member in others))
        return list(zip(others, answers, strict=True))

    # -- requests of clients

    @property
    def exist(self) -> bool:
        """See :class:`~dtx.manager.manager.OtherMembers`."""
        return bool(self._membership.others)

    async def ask(
        self, who: Requester, xid: Xid, operation: Operation, seconds: int, found: Elsewhere, until: float
    ) -> XaFlag | int | None:
        """See :class:`~dtx.manager.manager.OtherMembers`."""
        loop = asyncio.get_running_loop()
        asked = operation if operation in _FORWARDED else Operation.GET_TIMEOUT
        request = {
            "vhost": who.vhost, "user": who.user, "operator": who.operator, "operation": asked.value,
            "seconds": seconds, "xid": str(xid), "unvoted": found.member is None,
        }  # fmt: skip
        reason = "no member has it now"
        try:
            members = await self._members(found.member)
            left = until - loop.time()
            failpoint.at(Point.FORWARD_BEFORE)
            answers = await asyncio.gather(*(self._ask(member, request, left) for member in members))
        except LogError as error:
            reason = str(error)
        else:
            failpoint.at(Point.FORWARD_ANSWERED)
            for member, answer in sorted(zip(members, answers, strict=True), key=lambda each: _rank(each[1])):
                if isinstance(answer, dict):
                    read = _read(answer)
                    if operation is asked:
                        return read
                    text = f"another member has the branch: start and end work only where it began (xid {xid})"
                    raise XaError(ReplyCode.COMMAND_INVALID, text, {"member": member.address})
                if isinstance(answer, PeerLost) and asked not in _REPEATABLE:
                    return await self._answer_of_log(who, xid, operation, found, until, str(answer))
            unreachable = [str(answer) for answer in answers if answer is not None]
            if unreachable:
                reason = unreachable[0]
            elif found.member is None:
                await self._look_again(who, xid, found)
        if loop.time() + _PAUSE >= until:
            raise XaError(
                ReplyCode.INTERNAL_ERROR, f"another member may have the branch, try again: {reason} (xid {xid})"
            )
        await asyncio.sleep(_PAUSE)
        return None

    async def _answer_of_log(
        self, who: Requester, xid: Xid, operation: Operation, found: Elsewhere, until: float, reason: str
    ) -> XaFlag:
        """The answer to a request that may have been carried out; until it is in the log, or the time is over.

        Raises:
            XaError: 541, the outcome is not known.
        """
        clock = asyncio.get_running_loop().time
        while True:
            flag = await self._manager.answer_of_log(who, xid, operation, found)
            if flag is not None:
                return flag
            if clock() + _PAUSE >= until:
                text = f"another member has not answered, so the outcome is not known: {reason} (xid {xid})"
                raise XaError(ReplyCode.INTERNAL_ERROR, text)
            await asyncio.sleep(_PAUSE)

    async def unvoted(self, wanted: UnvotedFilter) -> tuple[list[UnvotedPage], list[str]]:
        """See :class:`~dtx.manager.manager.OtherMembers`."""
        try:
            answers = await self.ask_others({"list": wanted.to_json()}, _LISTED_WITHIN)
        except LogError:
            return [], [member.holder for member in self._membership.others]
        pages, missing = list[UnvotedPage](), list[str]()
        for member, answer in answers:
            try:
                if not isinstance(answer, dict):
                    raise TypeError(answer)
                pages.append(UnvotedPage.from_json(answer, member.holder))
            except (KeyError, ValueError, TypeError, XaError):  # also of another version
                missing.append(member.holder)
        return pages, missing

    async def order(self, given: Mapping[str, Any], member: UUID) -> Mapping[str, Any] | None:
        """See :class:`~dtx.manager.manager.OtherMembers`."""
        xid = given["xid"]
        try:
            others = await self._members(member)
        except LogError as error:
            raise XaError(ReplyCode.INTERNAL_ERROR, f"the order was not sent: {error} (xid {xid})") from error
        reason = "it is gone, and another one takes its branches"
        for other in others:
            # the other member answers after this time at the latest, even if the broker does not
            answer = await self._ask(other, {"order": given}, self._manager.limits.patience + _GRACE)
            if isinstance(answer, dict):
                _raise_refusal(answer)
                return answer
            if answer is None:
                return None
            reason = str(answer)
        raise XaError(ReplyCode.INTERNAL_ERROR, f"the member that has the branch does not answer: {reason} (xid {xid})")

    async def _members(self, wanted: UUID | None) -> list[Member]:
        """The other members, or the wanted one of them. It may be gone; then another one takes its branches soon."""
        others = self._membership.others
        if wanted is None or all(member.instance != wanted for member in others):
            others = await self._membership.read()
            known = {member.instance for member in others}
            for instance in self._clients.keys() - known:
                client = self._clients.pop(instance, None)
                if client is not None:
                    await client.close()
        return [member for member in others if wanted is None or member.instance == wanted]

    async def _ask(self, member: Member, request: Mapping[str, Any], seconds: float) -> Answer:
        began = time.monotonic()
        answer: Answer
        try:
            client = self._clients.get(member.instance)
            if client is None:
                lease = self._membership
                client = PeerClient(member.address, lease.holder, lambda: lease.secrets, self._tls, peer=member.holder)
                self._clients[member.instance] = client
            answer = await client.ask(request, seconds)
        except (PeerUnreachable, PeerLost) as error:
            answer = error
        except ValueError as error:  # its address
            answer = PeerUnreachable(str(error))
        if isinstance(answer, dict) and "elsewhere" in answer:
            answer = None
        operation = request.get("operation") or next(iter(request))  # an order, copies, a list
        self._metrics.request_forwarded(operation, _result(answer), time.monotonic() - began)
        return answer

    async def _look_again(self, who: Requester, xid: Xid, found: Elsewhere) -> None:
        """Raise the 404, unless the log has the branch or another ending of it now."""
        try:
            lookup = await self._manager.log.lookup(who.vhost, xid)
        except LogError as error:
            raise XaError(ReplyCode.INTERNAL_ERROR, f"the log cannot be read: {error} (xid {xid})") from error
        if lookup.branch is None and lookup.ending == found.ending:
            raise XaError(found.code, found.reason, found.facts)

    # -- requests of other members

    async def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request of another member. Its user has logged in there; this member checks what they may do.

        Raises:
            KeyError, ValueError, TypeError: it is malformed.
        """
        if "copies" in request:
            return _ELSEWHERE if self.on_copies is None else await self.on_copies(request["copies"])
        if "order" in request:
            return await self._handle_order(request["order"])
        if "list" in request:
            page = await unvoted_page(self._manager.entries(), UnvotedFilter.from_json(request["list"]))
            return page.to_json()
        operation = Operation(request["operation"])
        if operation not in _FORWARDED:
            raise ValueError(f"{operation} is not forwarded")
        who = Requester(str(request["user"]), str(request["vhost"]), operator=request["operator"] is True)
        try:
            answer = await self._manager.ask_here(
                who,
                Xid.parse(request["xid"]),
                operation,
                int(request["seconds"]),
                unvoted=request["unvoted"] is True,
            )
        except XaError as error:
            return _refusal(error)
        if answer is None:
            return _ELSEWHERE
        return {"flag": answer.name} if isinstance(answer, XaFlag) else {"seconds": answer}

    async def _handle_order(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an order of an operator, whose role the other member has checked."""
        order = from_json(given)
        entry = self._manager.known(order.vhost, order.xid)
        if entry is None or entry.record is None:
            return _ELSEWHERE
        try:
            done = await self._operators.carry_out(order)
        except XaError as error:
            return _refusal(error)
        return {"answer": done.answer, "state": done.state, "version": done.version}


def _refusal(error: XaError) -> dict[str, Any]:
    return {"code": int(error.code), "reason": error.reason, "facts": dict(error.facts), "cause": error.cause}


def _raise_refusal(answer: Mapping[str, Any]) -> None:
    """Raise the XaError of *answer*, if it has one."""
    if "code" in answer:
        cause = answer["cause"]
        cause = None if cause is None else RefusalCause(cause)
        raise XaError(ReplyCode(answer["code"]), answer["reason"], answer["facts"], cause)


def _result(answer: Answer) -> str:
    """The result of a request, for the metrics."""
    if isinstance(answer, dict):
        return "refused" if "code" in answer else "done"
    if answer is None:
        return "elsewhere"
    return "lost" if isinstance(answer, PeerLost) else "unreachable"


def _rank(answer: Answer) -> int:
    """The order in which answers count: of the member that carried the request out, none, refusals, all others."""
    if isinstance(answer, dict):
        return 2 if "code" in answer else 0
    return 1 if isinstance(answer, PeerLost) else 3


def _read(answer: Mapping[str, Any]) -> XaFlag | int:
    """The answer of another member.

    Raises:
        XaError: the other member has refused the request.
    """
    _raise_refusal(answer)
    return XaFlag[answer["flag"]] if "flag" in answer else int(answer["seconds"])
