"""The log lines about connections: the client's address, the opening and the close."""

from tests.support.processes import wait_until
from tests.support.raw import RawClient
from tests.support.service import DtxService


def said_of(service: DtxService, address: tuple[str, int], lines: int, behind: int) -> list[str]:
    """Wait for *lines* lines of the log after byte *behind* that contain the address; return them."""
    host, port = address

    def found() -> list[str]:
        said = service.log_path.read_bytes()[behind:].decode()
        return [line for line in said.splitlines() if f'"{host}:{port}"' in line]

    wait_until(lambda: len(found()) >= lines, what="a line about the client")
    return found()


def length(service: DtxService) -> int:
    """The length of the log in bytes; an earlier client may have had the same port."""
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


def test_the_log_names_the_address_of_a_refused_client(service: DtxService) -> None:
    """A broker that refuses a login knows only the address of dtx."""
    before = length(service)
    with RawClient(service.url()) as peer:
        peer.begin()
        peer.say(0, peer.start_ok(b"PLAIN", b"\0guest\0wrong"))
        peer.drain()
        (closed,) = said_of(service, peer.socket.getsockname(), 1, before)
    assert '"connection closed in its handshake"' in closed
    assert '"AMQP 0-9-1"' in closed
