"""Several active dtx of one resource manager.

Theory of operation. Each member has a row ``dtx.member`` with an epoch and the end of its lease, and each branch in the
log belongs to one member. The writer of a member proves its epoch as a dtx that is alone does. Another member that
finds the lease of this one run out deletes its row, and then takes its branches: one transaction, so that nothing can
write for them in between. The lease of the resource manager, ``dtx.lease``, belongs to all members together. While one
of them is there, no dtx can take it alone, also none of a version that knows no members.

PostgreSQL may be away for longer than a lease. So a member takes over only what has run out although itself has been in
contact with the database for a whole lease: the others had this time to renew theirs. A member that handed its branches
over, or whose process has certainly ended, is not waited for.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from secrets import token_bytes
from typing import Any, Final
from uuid import UUID

import psycopg

from dtx import failpoint
from dtx.db.connections import Dsn, application_name, connect, connect_now, session_settings
from dtx.failpoint import Point
from dtx.log.api import LogUnavailable
from dtx.log.lease import Lease, clock, is_dead
from dtx.telemetry import get_logger

ALL_MEMBERS: Final = UUID(int=0)
"""The instance in ``dtx.lease`` while members have the lease."""
_WATCH: Final = 0.5
"""Seconds between two looks at the other members."""
_LONGEST_ADOPTION: Final = 600.0
"""Seconds: PostgreSQL moves some ten thousand branches a second."""
_DELAY_OF_EACH: Final = 1e-5
"""Seconds for each branch here by which an attempt to take branches is delayed: members with fewer come first."""
_LONGEST_DELAY: Final = 0.7
"""Seconds: longer than the time between two looks, so that an idle member comes before a busy one."""
_SWEEPS: Final = 60
"""Looks between two searches for branches that belong to no member."""

_JOIN: Final = """
WITH lease AS (
    INSERT INTO dtx.lease AS l (rm, epoch, holder, process, instance, taken_at, expires_at, retention_days,
        archive_days, audit_days, duplicate_days)
    SELECT %(rm)s, 1, 'members', NULL, %(all)s, clock_timestamp(), clock_timestamp() + %(ttl)s * interval '1 second',
        %(journal)s, %(archive)s::integer, %(audit)s::integer, %(duplicates)s::integer
    FROM set_config('lock_timeout', %(patience)s, true)
    ON CONFLICT (rm) DO UPDATE SET epoch = l.epoch + (l.instance <> excluded.instance)::integer,
        holder = excluded.holder, process = NULL, instance = excluded.instance,
        taken_at = CASE l.instance WHEN excluded.instance THEN l.taken_at ELSE excluded.taken_at END,
        expires_at = greatest(l.expires_at, excluded.expires_at), retention_days = excluded.retention_days,
        archive_days = excluded.archive_days, audit_days = excluded.audit_days,
        duplicate_days = excluded.duplicate_days
    WHERE l.instance = excluded.instance OR l.expires_at < clock_timestamp() OR l.instance = %(dead)s
    RETURNING log
)
INSERT INTO dtx.member (rm, instance, epoch, holder, process, address, expires_at)
SELECT %(rm)s, %(instance)s, nextval('dtx.member_epoch'), %(holder)s, %(process)s, %(address)s,
    clock_timestamp() + %(ttl)s * interval '1 second'
FROM lease RETURNING epoch, (SELECT log FROM lease)
"""
# The lock of the writer's proof does not hold this up: it only protects the key, which has the epoch.
_RENEW: Final = """
WITH lease AS (
    UPDATE dtx.lease SET expires_at = greatest(expires_at, clock_timestamp() + %(ttl)s * interval '1 second')
    WHERE rm = %(rm)s AND instance = %(all)s RETURNING true
)
UPDATE dtx.member SET expires_at = clock_timestamp() + %(ttl)s * interval '1 second'
FROM lease WHERE instance = %(instance)s RETURNING epoch
"""
_LEAVE: Final = """
WITH lease AS (
    UPDATE dtx.lease SET expires_at = coalesce((SELECT max(m.expires_at) FROM dtx.member m
        WHERE m.rm = %(rm)s AND m.instance <> %(instance)s), '-infinity')
    WHERE rm = %(rm)s AND instance = %(all)s RETURNING true
)
DELETE FROM dtx.member USING lease WHERE instance = %(instance)s
"""
_MEMBERS: Final = """
SELECT instance, holder, process, address, expires_at < clock_timestamp(), pg_current_snapshot()::text
FROM dtx.member WHERE rm = %(rm)s ORDER BY joined_at, instance
"""
_MAKE_PROOF: Final = """
INSERT INTO dtx.member_secret (rm, secret) SELECT %(rm)s, %(secret)s
WHERE NOT EXISTS (SELECT FROM dtx.member_secret WHERE rm = %(rm)s)
"""
_PROOFS: Final = "SELECT secret FROM dtx.member_secret WHERE rm = %(rm)s ORDER BY made_at DESC LIMIT 2"
_ONE_AT_A_TIME: Final = "SELECT pg_try_advisory_xact_lock(hashtextextended('dtx members of ' || %(rm)s, 0))"
_IS_MEMBER: Final = "SELECT true FROM dtx.member WHERE instance = %(instance)s FOR KEY SHARE"
_REMOVE: Final = """
DELETE FROM dtx.member WHERE rm = %(rm)s AND instance = ANY(%(gone)s)
    AND (expires_at < clock_timestamp() OR instance = ANY(%(dead)s)) RETURNING instance
"""
_ADOPT: Final = """
UPDATE dtx.branch b SET member = %(instance)s WHERE b.rm = %(rm)s AND b.member IS DISTINCT FROM %(instance)s
    AND NOT EXISTS (SELECT FROM dtx.member m WHERE m.instance = b.member)
"""
_END_WRITER: Final = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE application_name = ANY(%(writers)s) AND usename = current_user AND state <> 'idle' AND wait_event_type = 'Client'
"""

_ROTATE: Final = """
WITH old AS (
    DELETE FROM dtx.member_secret WHERE rm = %(rm)s AND made_at < (
        SELECT max(made_at) FROM dtx.member_secret WHERE rm = %(rm)s)
)
INSERT INTO dtx.member_secret (rm, secret, made_at) VALUES (%(rm)s, %(secret)s, clock_timestamp())
"""

_log = get_logger(part="members")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of a resource manager, as the database has it.

    Args:
        instance: its id, new for each start.
        holder: for people: ``host:pid``.
        address: for other members: ``amqp://host:port``.
        expired: whether its lease has run out.
        dead: whether its process has certainly ended.
    """

    instance: UUID
    holder: str
    address: str
    expired: bool
    dead: bool


def rotate_secret(url: str, rm: str) -> None:
    """Make a new secret of the members of *rm*. The last one stays valid until the next rotation, older ones do not.

    Raises:
        LogUnavailable: the database is away, or the user may not change it.
    """
    dsn = Dsn(url)
    try:
        with connect_now(dsn) as connection:
            connection.execute(_ROTATE, {"rm": rm, "secret": token_bytes(32)})
    except (psycopg.Error, OSError) as error:
        raise LogUnavailable(f"the secret was not changed: {dsn.explain(error)}") from None


class Membership(Lease):
    """The right to be one of the active dtx of a resource manager; see :class:`~dtx.log.lease.Lease`.

    Args:
        address: for other members: ``amqp://host:port``.
        on_adopted: called after branches were taken, with the number of members that are gone, and of branches.
        arguments: of the lease.
    """

    is_member = True
    _taking_sql = _JOIN
    _renewal_sql = _RENEW
    _release_sql = _LEAVE

    def __init__(
        self,
        *arguments: Any,
        address: str,
        on_adopted: Callable[[int, int], None] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self._on_adopted = on_adopted
        self.others: tuple[Member, ...] = ()
        """The other members, at the last look."""
        self.secrets: tuple[bytes, ...] = ()
        """What members prove to each other, at the last look."""
        self.moment: str | None = None
        """PostgreSQL's snapshot of the last look: what it does not show was committed later."""
        self.is_adopting = False
        """Whether branches that this member may have taken from others are not in its memory yet."""
        self._parameters |= {"address": address, "all": ALL_MEMBERS}
        self._in_contact_since: float | None = None
        self._gaps = self._loaded = 0
        """How often the lease began or had run out, and that number when this member had last loaded the log."""
        self._seen: frozenset[UUID] = frozenset()
        self._must_sweep = True
        """Whether there may be branches that belong to no member."""
        self._looks = count(1)
        self._reading = asyncio.Lock()
        self._reads = 0
        self._failure: LogUnavailable | None = None
        """Of the last read."""
        self._reader: psycopg.AsyncConnection | None = None
        self._watching: asyncio.Task[None] | None = None
        self._branches: Callable[[], int] = lambda: 0

    @property
    def is_current(self) -> bool:
        """Whether this member knows all that others have told each other: it was a member all the time."""
        return self.valid and self._loaded == self._gaps

    def _extend(self, asked: float) -> None:
        if not self.valid:
            self._gaps += 1
        super()._extend(asked)
        if self._in_contact_since is None:
            self._in_contact_since = asked

    async def _disconnect(self) -> None:
        self._in_contact_since = None
        await super()._disconnect()

    async def begin(self) -> None:
        """After :meth:`take`: take the branches that belong to no member, and read the others.

        Raises:
            LogUnavailable: the database is away.
        """
        try:
            async with await self._session() as session:
                await session.execute(_MAKE_PROOF, self._parameters | {"secret": token_bytes(32)})
            await self.adopt()
        except (psycopg.Error, OSError) as error:
            raise LogUnavailable(f"cannot join the other members: {self._dsn.explain(error)}") from None
        await self.read()
        self._loaded = self._gaps

    async def read(self) -> tuple[Member, ...]:
        """The other members now. Callers that wait for a read share the next one.

        Raises:
            LogUnavailable: the database is away.
        """
        wanted = self._reads + 1
        async with self._reading:
            if self._reads < wanted:
                self._reads += 1
                self._failure = None
                try:
                    async with asyncio.timeout(self._ttl):
                        self._reader = self._reader or await self._session()
                        await self._read(self._reader)
                except (psycopg.Error, OSError, TimeoutError) as error:
                    self._failure = LogUnavailable(f"the members cannot be read: {self._dsn.explain(error)}")
                    await self._close_reader()
                except BaseException:
                    self._reads -= 1  # the next caller reads itself
                    await self._close_reader()
                    raise
            if self._failure is not None:  # what was read before may be outdated
                raise LogUnavailable(str(self._failure))
            return self.others

    async def adopt(self, gone: frozenset[UUID] = frozenset(), dead: frozenset[UUID] = frozenset()) -> int | None:
        """Take the branches of members that are gone, and those that belong to no member.

        Args:
            gone: members whose lease may have run out. Where it has not, nothing changes.
            dead: those of them whose process has certainly ended.

        Returns:
            The number of branches; ``None`` if nothing was tried, because another member does the same, or one of them
            is still in the middle of a group.

        Raises:
            LogUnavailable, psycopg.Error, OSError: the outcome is not known.
        """
        given = self._parameters | {"gone": list(gone), "dead": list(dead)}
        async with await self._session() as session:
            try:
                failpoint.at(Point.ADOPT_BEFORE)
                async with session.transaction():
                    cursor = session.cursor()
                    for proof in (_ONE_AT_A_TIME, _IS_MEMBER):
                        if await (await cursor.execute(proof, given)).fetchone() != (True,):
                            return None
                    removed = await (await cursor.execute(_REMOVE, given)).fetchall()
                    for (instance,) in removed:
                        _log.warning("a member is gone, taking its branches", member=str(instance))
                    taken = (await cursor.execute(_ADOPT, given)).rowcount
                    failpoint.at(Point.ADOPT_MOVED)
            except psycopg.errors.LockNotAvailable:
                # It stopped in the middle of a group: PostgreSQL would wait for the other half for hours.
                writers = [application_name("writer", instance) for instance in gone]
                await session.execute(_END_WRITER, {"writers": writers})
                return None
        failpoint.at(Point.ADOPT_AFTER)
        if self._on_adopted is not None:
            self._on_adopted(len(removed), taken)
        return taken

    def watch(self, adopted: Callable[[], Awaitable[None]], branches: Callable[[], int] = lambda: 0) -> None:
        """Look for members that are gone until :meth:`unwatch`.

        Args:
            adopted: called after branches were taken.
            branches: returns the number of branches here. The member with the fewest takes those of others.
        """
        self._branches = branches
        self._watching = asyncio.create_task(self._watch(adopted), name="members")

    async def unwatch(self) -> None:
        """Take no more branches."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None

    async def release(self) -> None:
        """Leave. The branches belong to no member then, and the others take them."""
        await self.unwatch()
        await self._close_reader()
        await super().release()

    async def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()

    async def _session(self) -> psycopg.AsyncConnection:
        """A session of its own: a takeover of many branches must not delay renewals."""
        settings = session_settings("members", self.instance, statement_timeout=_LONGEST_ADOPTION)
        settings["lock_timeout"] = self._parameters["patience"]
        # A takeover that was stopped halfway has locks, and no other member can take over until its session has ended.
        settings["idle_in_transaction_session_timeout"] = f"{round(self._ttl * 1000)}ms"
        try:
            return await connect(self._dsn, settings, timeout=self._ttl / 3)
        except (psycopg.Error, OSError) as error:
            raise LogUnavailable(f"cannot connect to {self._dsn.shown}: {self._dsn.explain(error)}") from None

    async def _read(self, session: psycopg.AsyncConnection) -> tuple[Member, ...]:
        secrets = await (await session.execute(_PROOFS, self._parameters)).fetchall()
        self.secrets = tuple(secret for (secret,) in secrets)
        rows = await (await session.execute(_MEMBERS, self._parameters)).fetchall()
        self.moment = next((moment for *_, moment in rows), self.moment)
        self.others = tuple(
            Member(instance=instance, holder=holder, address=address, expired=expired, dead=is_dead(process))
            for instance, holder, process, address, expired, _ in rows
            if instance != self.instance
        )
        return self.others

    async def _watch(self, adopted: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await self._look(adopted)
            except (psycopg.Error, OSError, LogUnavailable, TimeoutError) as error:
                _log.warning("the other members cannot be seen", error=self._dsn.explain(error))
            except Exception:  # noqa: BLE001 - logged; if this task ended, no branch would be taken over
                _log.exception("the look at the other members failed")
            await asyncio.sleep(_WATCH)

    async def _look(self, adopted: Callable[[], Awaitable[None]]) -> None:
        others = await self.read()
        there = frozenset(member.instance for member in others)
        dead = frozenset(member.instance for member in others if member.dead)
        gone = dead | frozenset(member.instance for member in others if member.expired and self._may_take)
        # one that has left handed its branches over, or another member took them
        self._must_sweep |= bool(self._seen - there) or next(self._looks) % _SWEEPS == 0
        self._seen = there
        if gone or self._must_sweep:
            await asyncio.sleep(min(_LONGEST_DELAY, self._branches() * _DELAY_OF_EACH))
            self.is_adopting = True  # also if the outcome is not known: then they are loaded as well
            taken = await self.adopt(gone, dead)
            self._must_sweep = taken is None
        gaps = self._gaps
        if self.is_adopting or self._loaded != gaps:
            await adopted()
            self.is_adopting = False
            self._loaded = gaps

    @property
    def _may_take(self) -> bool:
        """Whether this member has been in contact for so long that others could have renewed their leases."""
        since = self._in_contact_since
        return self.valid and since is not None and clock() - since >= self._ttl
