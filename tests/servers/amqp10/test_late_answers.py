"""Late answers of the coordinator: their control link is detached, and another link has its handle.

"…the coordinator detaches the link": a control link, never another link that has got the same handle meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.endpoint import Detached, Disposed
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import ACCEPTED, Discharge
from dtx.wire.amqp10.session import Session
from tests.servers.amqp10.raw import Raw
from tests.support.client import connected, take_all
from tests.support.processes import wait_until
from tests.support.service import DtxService

_REFUSES = """
CREATE FUNCTION late_refusal() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_advisory_xact_lock(7);
    RAISE 'could not extend file: No space left on device' USING ERRCODE = '53100';
END $$
"""
_TRIGGER = """
CREATE TRIGGER late_refusal BEFORE INSERT ON dtx.journal FOR EACH ROW EXECUTE FUNCTION late_refusal()
"""


@contextmanager
def refusing_late(service: DtxService) -> Iterator[None]:
    """Let the database refuse each record, but only when this context ends."""
    assert service.database is not None
    with psycopg.connect(service.database, autocommit=True) as database:
        database.execute("SELECT pg_advisory_lock(7)")
        database.execute(_REFUSES)
        database.execute(_TRIGGER)
        try:
            yield
        finally:
            database.execute("SELECT pg_advisory_unlock(7)")


@contextmanager
def mended(service: DtxService) -> Iterator[None]:
    """Let the database accept all records again after this context."""
    assert service.database is not None
    try:
        yield
    finally:
        with psycopg.connect(service.database) as database:
            database.execute("LOCK TABLE dtx.journal")  # before its partitions, in the order of the writers
            database.execute("DROP FUNCTION late_refusal CASCADE")


def somebody_waits(service: DtxService) -> bool:
    """Whether a record waits for the database."""
    assert service.database is not None
    with psycopg.connect(service.database) as database:
        waiting = database.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        return waiting.fetchone() != (0,)


def in_the_place(raw: Raw, session: Session, gone: Link, queue: str | None) -> Link:
    """Detach *gone*, and attach a link to *queue* or to the coordinator, which gets its handle."""
    raw.detach(session, gone)
    link = raw.control(session, "place", rejects=False) if queue is None else raw.sender(session, queue, "place")
    assert link.handle == gone.handle
    return link


@pytest.fixture
def queue(small: DtxService) -> Iterator[str]:
    """An empty queue."""
    with connected(small.url()) as connection:
        connection.channel().queue_declare("late", durable=True)
    yield "late"
    with connected(small.url()) as connection:
        connection.channel().queue_delete("late")


@pytest.mark.parametrize("coordinates", [False, True], ids=["sender", "control"])
@pytest.mark.parametrize("rejects", [False, True], ids=["detach", "reject"])
def test_a_late_failed_discharge_does_not_detach_a_newer_link(
    small: DtxService, queue: str, coordinates: bool, rejects: bool
) -> None:
    with Raw(small) as raw:
        session = raw.opened().begin()
        control, other = raw.control(session, rejects=rejects), raw.control(session, "other")
        sender = raw.sender(session, queue)
        lost, kept = raw.declare(session, control), raw.declare(session, other)
        raw.outcome(session, raw.post(sender, b"lost", lost))
        raw.outcome(session, raw.post(sender, b"kept", kept))
        with mended(small):
            with refusing_late(small):
                number = control.send(b"d", message.value(Discharge(txn_id=lost)))
                raw.flush()
                wait_until(lambda: somebody_waits(small))
                link = in_the_place(raw, session, control, None if coordinates else queue)
                mine = raw.declare(session, link) if coordinates else b""
            wait_until(lambda: not somebody_waits(small))
        assert raw.discharge(session, other, kept) == ACCEPTED  # the log accepted it after the refused one
        if coordinates:
            assert raw.discharge(session, link, mine) == ACCEPTED
        else:
            assert raw.outcome(session, raw.post(link, b"later")) == ACCEPTED
        said = [event for event in raw.events if isinstance(event, Disposed | Detached)]
        assert said == [], number
    with connected(small.url()) as connection:
        assert take_all(connection.channel(), queue) == [b"kept"] + [b"later"] * (not coordinates)
