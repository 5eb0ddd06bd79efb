"""A caller that waits for a commit connection gets it as soon as the broker is back."""

import asyncio
from collections.abc import Callable

import pytest

from dtx.store.rabbitmq import commit_connection
from dtx.store.rabbitmq.commit_connection import CommitConnection, CommitSettings
from dtx.store.rabbitmq.service import Broker
from dtx.xa.codes import XaError
from tests.support.branches import new_identity
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode


@pytest.mark.parametrize("asked", ["before", "behind"])
async def test_a_commit_connection_does_not_pause_while_a_caller_waits(
    rabbitmq: RabbitNode, proxy: Callable[[str, int], Proxy], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """While the broker was away, the pause of the commit connection became longer than a select waits.

    The caller asks *before* the broker is back, or *behind* its return, during the pause of the commit connection.
    """
    monkeypatch.setattr(commit_connection, "_BACKOFF", (3600.0,))
    network = proxy("127.0.0.1", rabbitmq.port)
    network.cut(refuse=True)
    broker = Broker.from_url(rabbitmq.url().replace(f":{rabbitmq.port}", f":{network.port}"))
    commits = CommitConnection(broker, "/", CommitSettings(identity=new_identity("waiting"), replay="always"))
    try:
        async with asyncio.timeout(60):
            while commits.problem == "not connected yet":
                await asyncio.sleep(0)
        if asked == "before":
            waiting = asyncio.create_task(commits.ready(60))
            await asyncio.sleep(0)
            network.resume()
            await waiting
        else:
            with pytest.raises(XaError, match="dtx cannot work in vhost"):
                await commits.ready(0)
            network.resume()
            await commits.ready(60)
        assert commits.problem is None
    finally:
        await commits.close()
