"""Clients of AMQP 1.0 work for branches at any member."""

import pytest

from dtx.client import XaFlag
from tests.support.client import new_xid
from tests.support.crash import Stage
from tests.support.proton import Client


def test_a_branch_of_amqp_1_0_begins_at_any_member(stage: Stage) -> None:
    other, queue = stage.another_service(), stage.declare("q")
    home = {"virtual_host": f"vhost:{stage.vhost}"}
    with Client(other, **home) as client, Client(stage.service, **home) as elsewhere, stage.coordinator() as manager:
        local, outcome = client.declare()
        client.send(local, client.sender(queue), "local")
        assert client.end(local, outcome) == "committed"
        xid = new_xid()
        transaction, outcome = client.declare(xid.to_wire())
        client.send(transaction, client.sender(queue), "named")
        with pytest.raises(AssertionError, match="declare failed"):
            elsewhere.declare(xid.to_wire())
        assert client.end(transaction, outcome) == "committed"
        assert manager.prepare(xid) is XaFlag.OK
        assert manager.commit(xid) is XaFlag.OK
    assert len(stage.bodies(queue)) == 2
