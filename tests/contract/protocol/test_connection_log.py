"""What the log says of clients: whence each came, and that it left."""

from tests.support.processes import wait_until
from tests.support.raw import RawClient
from tests.support.service import DtxService


def said_of(service: DtxService, address: tuple[str, int], lines: int, behind: int) -> list[str]:
    """So many lines of the log, *behind* so many bytes, which name the client's address."""
    host, port = address

    def found() -> list[str]:
        said = service.log_path.read_bytes()[behind:].decode()
        return [line for line in said.splitlines() if f'"{host}:{port}"' in line]

    wait_until(lambda: len(found()) >= lines, what="a line about the client")
    return found()


def length(service: DtxService) -> int:
    """Bytes of the log so far; a client that has left may have had the port of the next one."""
    return service.log_path.stat().st_size


def test_the_log_names_address_and_close_of_a_client(service: DtxService) -> None:
    before = length(service)
    with RawClient(service.url()) as peer:
        peer.log_in()
        address = peer.socket.getsockname()
        said_of(service, address, 1, before)
        peer.close()
        opened, closed = said_of(service, address, 2, before)
    assert '"connection opened"' in opened
    assert '"connection closed"' in closed
    assert all('"AMQP 0-9-1"' in line and '"guest"' in line for line in (opened, closed))


def test_the_log_names_the_address_of_a_client_that_was_refused(service: DtxService) -> None:
    """A broker that refuses a login knows the address of dtx alone."""
    before = length(service)
    with RawClient(service.url()) as peer:
        peer.begin()
        peer.say(0, peer.start_ok(b"PLAIN", b"\0guest\0wrong"))
        peer.drain()
        (closed,) = said_of(service, peer.socket.getsockname(), 1, before)
    assert '"connection closed in its handshake"' in closed
    assert '"AMQP 0-9-1"' in closed
