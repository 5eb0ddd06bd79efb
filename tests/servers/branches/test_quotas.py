"""Quotas on connections and channels, in both modes."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dtx.auth.roles import OperatorRole
from dtx.wire.amqp10.endpoint import Closed, Ended
from dtx.wire.amqp10.errors import Condition
from tests.servers.admin.conftest import somebody
from tests.servers.amqp10.raw import Raw
from tests.servers.branches.conftest import MakeScene
from tests.support.crash import Scene
from tests.support.raw import ConnectionEnded, RawClient, session
from tests.support.service import ADMIN


@pytest.fixture(scope="module")
def stage(make_scene: MakeScene) -> Scene:
    """A dtx whose users may have two connections and three channels."""
    return make_scene("--quota", "user=* connections=2 channels=3", *ADMIN)


def test_a_connection_beyond_the_quota_is_refused(stage: Scene) -> None:
    url = stage.service.url(vhost=stage.vhost)
    with session(url):
        for _ in range(2):
            with session(url), pytest.raises(ConnectionEnded, match="has 2 connections, its quota is 2"):
                RawClient(url).log_in()


def test_a_channel_beyond_the_quota_ends_its_connection(stage: Scene) -> None:
    """RabbitMQ does the same when a user has its maximum of channels."""
    url = stage.service.url(vhost=stage.vhost)
    with session(url) as first, session(url) as second:
        first.open(1)
        second.open(1)
        second.open(2)
        with pytest.raises(ConnectionEnded, match="has 3 channels, its quota is 3"):
            first.open(3)
        second.open(3)


def test_sessions_count_as_channels(stage: Scene) -> None:
    """A session beyond the quota is refused. The connection stays open."""
    with (
        Raw(stage.service, hostname=f"vhost:{stage.vhost}") as raw,
        session(stage.service.url(vhost=stage.vhost)) as client,
    ):
        sessions = [raw.opened().begin(), raw.begin()]
        client.open(1)
        refused = raw.engine.new_session()
        refused.begin()
        ended = raw.expect(Ended)
        assert ended.error is not None
        assert ended.error.condition == Condition.RESOURCE_LIMIT_EXCEEDED
        assert "has 3 channels, its quota is 3" in (ended.error.description or "")
        sessions[0].end()
        raw.flush()
        raw.begin()
    with session(stage.service.url(vhost=stage.vhost)) as client:
        for number in (1, 2, 3):
            client.open(number)


def test_a_connection_beyond_the_quota_is_refused_in_amqp_10(stage: Scene) -> None:
    url = stage.service.url(vhost=stage.vhost)
    with session(url), session(url), Raw(stage.service, hostname=f"vhost:{stage.vhost}") as raw:
        assert refusal(raw) == Condition.NOT_ALLOWED


def refusal(raw: Raw) -> str:
    """The error condition with which the server closes the connection."""
    raw.until(lambda: any(isinstance(event, Closed) for event in raw.events))
    error = next(event.error for event in raw.events if isinstance(event, Closed))
    assert error is not None
    return error.condition


def test_quotas_are_shown_with_the_usage(stage: Scene) -> None:
    """In the API and in the metrics. A virtual host without a quota shows none."""
    viewer = somebody(stage, OperatorRole.VIEWER)
    with session(stage.service.url(vhost=stage.vhost)) as client:
        client.open(1)
        status = viewer.get("/dtx/v1/status")
        text = viewer.get("/metrics").decode()
    shown = {(usage["scope"], usage["name"]): usage for usage in status["usage"]}
    assert shown["user", "guest"]["quota"] == {"connections": 2, "channels": 3}
    assert shown["user", "guest"]["used"].items() >= {"connections": 1, "channels": 1}.items()
    assert shown["vhost", stage.vhost]["quota"] == {}
    quotas = {
        (sample.labels["scope"], sample.labels["name"], sample.labels["resource"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "dtx_quota"
    }
    assert quotas == {("user", "guest", "connections"): 2, ("user", "guest", "channels"): 3}
