"""Sessions: what the transaction manager asks of one connection to a resource manager, with threads and with asyncio.

What a kind of resource does is written once, as a :class:`SessionCore`; :class:`DrivenSession` and
:class:`AsyncDrivenSession` drive it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from dtx.client.errors import XAException, XARollback
from dtx.client.tm.steps import Work, drive, drive_async
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

Handle = TypeVar("Handle")


class AnySession(ABC, Generic[Handle]):
    """What sessions with threads and with asyncio have in common.

    Args:
        own: whether the connection is the resource's: one of the application's serves nobody else, and stays open.
    """

    one_phase_repeatable: ClassVar[bool] = False
    """Whether a one-phase commit whose answer was lost can be asked for again, on another session."""

    def __init__(self, *, own: bool) -> None:
        self.own = own

    @property
    @abstractmethod
    def handle(self) -> Handle:
        """What the application works with."""


class Session(AnySession[Handle]):
    """One connection to a resource manager, used by one thread at a time."""

    @abstractmethod
    def start(self, xid: Xid) -> None:
        """Work that follows belongs to the branch."""

    @abstractmethod
    def end(self, xid: Xid) -> None:
        """Work that follows does not belong to the branch any more."""

    @abstractmethod
    def prepare(self, xid: Xid) -> XaFlag:
        """OK, or RDONLY: there is nothing to commit and the branch is gone."""

    @abstractmethod
    def commit(self, xid: Xid) -> None:
        """Second phase."""

    @abstractmethod
    def commit_one_phase(self, xid: Xid) -> None:
        """The only phase. XARollback: it is rolled back. Everything else: its outcome is not known."""

    @abstractmethod
    def rollback(self, xid: Xid) -> None:
        """Roll back, whether it is prepared or not, ended or not."""

    @abstractmethod
    def forget(self, xid: Xid) -> None:
        """Discard the record of a heuristic outcome."""

    @abstractmethod
    def recover(self) -> list[Xid]:
        """All branches that this resource has in doubt or heuristically completed, whoever's they are."""

    @abstractmethod
    def usable(self) -> bool:
        """Whether it is good for another transaction."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; raises nothing."""


class AsyncSession(AnySession[Any]):
    """One connection to a resource manager, used by one task at a time; as :class:`Session`, and awaited."""

    @abstractmethod
    async def start(self, xid: Xid) -> None:
        """Work that follows belongs to the branch."""

    @abstractmethod
    async def end(self, xid: Xid) -> None:
        """Work that follows does not belong to the branch any more."""

    @abstractmethod
    async def prepare(self, xid: Xid) -> XaFlag:
        """OK or RDONLY."""

    @abstractmethod
    async def commit(self, xid: Xid) -> None:
        """Second phase."""

    @abstractmethod
    async def commit_one_phase(self, xid: Xid) -> None:
        """The only phase."""

    @abstractmethod
    async def rollback(self, xid: Xid) -> None:
        """Roll back, in whatever state."""

    @abstractmethod
    async def forget(self, xid: Xid) -> None:
        """Discard the record of a heuristic outcome."""

    @abstractmethod
    async def recover(self) -> list[Xid]:
        """One whole scan."""

    @abstractmethod
    async def usable(self) -> bool:
        """Whether it is good for another transaction."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection; raises nothing."""


class SessionCore(ABC):
    """What the methods of a session do, whoever drives them; their names and meanings are those of :class:`Session`."""

    handle: Any

    @abstractmethod
    def start(self, xid: Xid) -> Work[None]:
        """Associate."""

    @abstractmethod
    def end(self, xid: Xid) -> Work[None]:
        """Dissociate."""

    @abstractmethod
    def prepare(self, xid: Xid) -> Work[XaFlag]:
        """First phase."""

    @abstractmethod
    def commit(self, xid: Xid) -> Work[None]:
        """Second phase."""

    @abstractmethod
    def commit_one_phase(self, xid: Xid) -> Work[None]:
        """The only phase."""

    @abstractmethod
    def rollback(self, xid: Xid) -> Work[None]:
        """In whatever state."""

    @abstractmethod
    def forget(self, xid: Xid) -> Work[None]:
        """A heuristic outcome."""

    @abstractmethod
    def recover(self) -> Work[list[Xid]]:
        """One whole scan."""

    @abstractmethod
    def usable(self) -> Work[bool]:
        """Whether for another transaction."""

    @abstractmethod
    def close(self) -> Work[None]:
        """Let go of the connection."""


class DrivenSession(Session[Handle]):
    """A session in a thread.

    Args:
        core: what it does.
        own: whether the connection is to be closed with it.
    """

    def __init__(self, core: SessionCore, *, own: bool) -> None:
        super().__init__(own=own)
        self._core = core

    @property
    def handle(self) -> Handle:
        """What the application works with."""
        return self._core.handle  # type: ignore[no-any-return]

    def start(self, xid: Xid) -> None:
        """See :class:`Session`; so are all others."""
        drive(self._core.start(xid))

    def end(self, xid: Xid) -> None:  # noqa: D102 - see start
        drive(self._core.end(xid))

    def prepare(self, xid: Xid) -> XaFlag:  # noqa: D102
        return drive(self._core.prepare(xid))

    def commit(self, xid: Xid) -> None:  # noqa: D102
        drive(self._core.commit(xid))

    def commit_one_phase(self, xid: Xid) -> None:  # noqa: D102
        drive(self._core.commit_one_phase(xid))

    def rollback(self, xid: Xid) -> None:  # noqa: D102
        drive(self._core.rollback(xid))

    def forget(self, xid: Xid) -> None:  # noqa: D102
        drive(self._core.forget(xid))

    def recover(self) -> list[Xid]:  # noqa: D102
        return drive(self._core.recover())

    def usable(self) -> bool:  # noqa: D102
        return drive(self._core.usable())

    def close(self) -> None:  # noqa: D102
        drive(self._core.close())


class AsyncDrivenSession(AsyncSession):
    """A session in a task.

    Args:
        core: what it does.
        own: whether the connection is to be closed with it.
    """

    def __init__(self, core: SessionCore, *, own: bool) -> None:
        super().__init__(own=own)
        self._core = core

    @property
    def handle(self) -> Any:
        """What the application works with."""
        return self._core.handle

    async def start(self, xid: Xid) -> None:
        """See :class:`Session`; so are all others."""
        await drive_async(self._core.start(xid))

    async def end(self, xid: Xid) -> None:  # noqa: D102 - see start
        await drive_async(self._core.end(xid))

    async def prepare(self, xid: Xid) -> XaFlag:  # noqa: D102
        return await drive_async(self._core.prepare(xid))

    async def commit(self, xid: Xid) -> None:  # noqa: D102
        await drive_async(self._core.commit(xid))

    async def commit_one_phase(self, xid: Xid) -> None:  # noqa: D102
        await drive_async(self._core.commit_one_phase(xid))

    async def rollback(self, xid: Xid) -> None:  # noqa: D102
        await drive_async(self._core.rollback(xid))

    async def forget(self, xid: Xid) -> None:  # noqa: D102
        await drive_async(self._core.forget(xid))

    async def recover(self) -> list[Xid]:  # noqa: D102
        return await drive_async(self._core.recover())

    async def usable(self) -> bool:  # noqa: D102
        return await drive_async(self._core.usable())

    async def close(self) -> None:  # noqa: D102
        await drive_async(self._core.close())


class DtxCore(SessionCore):
    """A channel for work, and one beside it for outcomes: a refused one must not cost the application its channel.

    Args:
        work: the channel's XAResource, of either kind.
        outcomes: the Coordinator of its connection, of the same kind.
        scan: all branches that the coordinator recovers.
        alive: whether channel and connection are open.
        leave: closes what is to be closed with the session; raises nothing.
    """

    def __init__(
        self,
        work: Any,
        outcomes: Any,
        *,
        scan: Callable[[], Any],
        alive: Callable[[], Any],
        leave: Callable[[], Any],
    ) -> None:
        self._work, self._outcomes = work, outcomes
        self._scan, self._alive, self._leave = scan, alive, leave
        self._ended = True

    @property
    def handle(self) -> Any:
        """The channel."""
        return self._work.channel

    def start(self, xid: Xid) -> Work[None]:
        """Associate the channel."""
        yield partial(self._work.start, xid)
        self._ended = False

    def end(self, xid: Xid) -> Work[None]:
        """Dissociate the channel. What was published is on its way before: the channel keeps the order."""
        self._ended = True
        yield partial(self._work.end, xid)

    def prepare(self, xid: Xid) -> Work[XaFlag]:
        """First phase."""
        vote: XaFlag = yield partial(self._outcomes.prepare, xid)
        return vote

    def commit(self, xid: Xid) -> Work[None]:
        """Second phase."""
        yield partial(self._outcomes.commit, xid)

    def commit_one_phase(self, xid: Xid) -> Work[None]:
        """The only phase."""
        yield partial(self._outcomes.commit, xid, one_phase=True)

    def rollback(self, xid: Xid) -> Work[None]:
        """Roll back. A branch that was not ended is ended as failed; where that cannot be, its channel is gone."""
        if not self._ended:
            self._ended = True
            with suppress(XAException):
                yield partial(self._work.end, xid, fail=True)
        with suppress(XARollback):
            yield partial(self._outcomes.rollback, xid)

    def forget(self, xid: Xid) -> Work[None]:
        """Discard a heuristic outcome."""
        yield partial(self._outcomes.forget, xid)

    def recover(self) -> Work[list[Xid]]:
        """One whole scan."""
        found: list[Xid] = yield self._scan
        return found

    def usable(self) -> Work[bool]:
        """Whether it is outside of a branch, and open."""
        if not self._ended:
            return False
        alive: bool = yield self._alive
        return alive

    def close(self) -> Work[None]:
        """Close the connection, if it is the session's."""
        yield self._leave
