"""A caller that waits for a lane gets it as soon as the broker is back."""

import asyncio
from collections.abc import Callable

import pytest

from dtx.store.rabbitmq import phase_two as lanes
from dtx.store.rabbitmq.phase_two import Lane, LaneSettings
from dtx.store.rabbitmq.service import Broker
from dtx.xa.codes import XaError
from tests.support.branches import new_identity
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode


@pytest.mark.parametrize("asked", ["before", "behind"])
async def test_a_lane_does_not_pause_while_somebody_waits_for_it(
    rabbitmq: RabbitNode, proxy: Callable[[str, int], Proxy], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """While the broker was away, the pause of the lane became longer than a select waits.

    The caller asks *before* the broker is back, or *behind* its return, during the pause of the lane.
    """
    monkeypatch.setattr(lanes, "_BACKOFF", (3600.0,))
    network = proxy("127.0.0.1", rabbitmq.port)
    network.cut(refuse=True)
    broker = Broker.from_url(rabbitmq.url().replace(f":{rabbitmq.port}", f":{network.port}"))
    lane = Lane(broker, "/", LaneSettings(identity=new_identity("waiting"), replay="always"))
    try:
        async with asyncio.timeout(60):
            while lane.problem == "not connected yet":
                await asyncio.sleep(0)
        if asked == "before":
            waiting = asyncio.create_task(lane.ready(60))
            await asyncio.sleep(0)
            network.resume()
            await waiting
        else:
            with pytest.raises(XaError, match="dtx cannot work in vhost"):
                await lane.ready(0)
            network.resume()
            await lane.ready(60)
        assert lane.problem is None
    finally:
        await lane.close()
