"""Quotas on connections and channels, in both modes."""

import pytest

from tests.servers.branches.conftest import MakeScene
from tests.support.crash import Scene
from tests.support.raw import ConnectionEnded, RawClient


@pytest.fixture(scope="module")
def stage(make_scene: MakeScene) -> Scene:
    """A dtx whose users may have two connections and three channels."""
    return make_scene("--quota", "user=* connections=2 channels=3")


def test_a_connection_beyond_the_quota_is_refused(stage: Scene) -> None:
    url = stage.service.url(vhost=stage.vhost)
    with RawClient(url):
        for _ in range(2):
            with RawClient(url), pytest.raises(ConnectionEnded, match="has 2 connections, its quota is 2"):
                RawClient(url)


def test_a_channel_beyond_the_quota_ends_its_connection(stage: Scene) -> None:
    """RabbitMQ does the same where a user has as many channels as it may."""
    url = stage.service.url(vhost=stage.vhost)
    with RawClient(url) as first, RawClient(url) as second:
        first.open(1)
        second.open(1)
        second.open(2)
        with pytest.raises(ConnectionEnded, match="has 3 channels, its quota is 3"):
            first.open(3)
        second.open(3)
