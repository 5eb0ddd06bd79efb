"""When standalone mode reads from a client, without sockets."""

from dtx.server.standalone.connection import StandaloneConnection
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.closes import connection_close
from dtx.wire.amqp09.errors import HardCode
from dtx.wire.amqp09.settings import MAX_BACKLOG
from tests.evidence.fuzz.server import ENTER, START_OK, TWO_CHANNELS, Wire, hear, whole


async def test_a_paused_client_is_read_when_dtx_closes() -> None:
    """Its close-ok is read, even if many frames wait on a channel."""
    async with whole() as (parts, _):
        wire = Wire()
        connection = StandaloneConnection(parts, wire)
        await connection.connect()
        for said in (START_OK, ENTER, TWO_CHANNELS):
            await hear(connection, wire, said)
        connection.channels[1].order.occupy()
        declare = methods.QueueDeclare(b"q", arguments=bytes(10_000)).frame(1)
        await hear(connection, wire, declare * (MAX_BACKLOG // len(declare) + 1))
        before = wire.reads
        connection.stop(connection_close(HardCode.CONNECTION_FORCED, "shutdown"))
        assert (before, wire.reads) == (False, True)
        await hear(connection, wire, methods.ConnectionCloseOk().frame(0))
        await connection.ended
