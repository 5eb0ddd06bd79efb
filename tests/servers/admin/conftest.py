"""dtx with its operators' API, in both modes."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.client import XaFlag, Xid
from tests.support.broker import MODES
from tests.support.crash import Scene, Stage, StandaloneStage, work
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN


@pytest.fixture(params=MODES)
def scene(request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[Scene]:
    with ExitStack() as stack:
        if request.param == "standalone":
            yield stack.enter_context(StandaloneStage(postgres, options=ADMIN))
        else:
            node = request.getfixturevalue("shared_rabbitmq")
            yield stack.enter_context(Stage(node, postgres, options=ADMIN))


@pytest.fixture
def alone(postgres: PostgresServer) -> Iterator[StandaloneStage]:
    with StandaloneStage(postgres, options=ADMIN) as stage:
        yield stage


@pytest.fixture(scope="module")
def shared(postgres: PostgresServer) -> Iterator[StandaloneStage]:
    """As ``alone``, for tests that change nothing that stays. Its API also answers to the host name ``dtx.example``."""
    with StandaloneStage(postgres, options=(*ADMIN, "--admin-host", "dtx.example")) as stage:
        yield stage


def somebody(scene: Scene, role: OperatorRole) -> Operator:
    """An operator with a new token for *role*."""
    trail = OperatorLog(scene.database, "dtx")
    number = len(trail.tokens())
    secret = trail.make_token(f"{role} {number}", role, "test")
    return Operator(scene.service.admin_url, token=secret)


def orphan(scene: Scene) -> Xid:
    """A prepared branch whose transaction manager is gone: it published to *out* and consumed from *in*."""
    for queue in ("in", "out"):
        scene.declare(queue)
    scene.fill("in", b"consumed")
    with scene.connected() as connection:
        xa, xid = work(connection.channel(), publish={"out": [b"published"]}, consume={"in": 1})
        assert xa.prepare(xid) is XaFlag.OK
    return xid
