"""Protocols that dtx does not speak in front of a broker."""

import socket

import pytest

from dtx.wire.amqp09.frames import Protocol
from tests.support.service import DtxService


@pytest.mark.parametrize("header", [Protocol.AMQP_1_0, Protocol.AMQP_1_0_SASL, Protocol.AMQP_1_0_TLS])
def test_a_client_of_amqp_1_0_is_told_what_is_spoken_here(service: DtxService, header: Protocol) -> None:
    """AMQP 0-9-1, 4.2.2: "the server MUST … write a valid protocol header … and then close the socket connection"."""
    with socket.create_connection((service.host, service.port), 10) as client:
        client.sendall(header.value)
        assert client.recv(100) == Protocol.AMQP_0_9_1.value
        assert client.recv(100) == b""
