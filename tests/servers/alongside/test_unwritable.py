"""A message that cannot be encoded as AMQP is refused, and the commit connection still works."""

from collections.abc import Sequence
from uuid import uuid4

from dtx.log.records import Replay, Unit, WorkKind, WorkRow
from dtx.store.api import PhaseTwo, Refused, UnitProgress
from dtx.store.rabbitmq.commit_connection import CommitConnection, CommitSettings
from dtx.store.rabbitmq.service import Broker
from dtx.wire.amqp09.properties import EMPTY
from tests.support.branches import new_identity
from tests.support.rabbitmq import RabbitNode

CHANNELS = 2


async def test_a_unit_that_cannot_be_encoded_frees_its_channel(rabbitmq: RabbitNode) -> None:
    commits = CommitConnection(
        Broker.from_url(rabbitmq.url()),
        "/",
        CommitSettings(identity=new_identity("unwritable"), channels=CHANNELS, replay="always"),
    )

    async def work() -> Sequence[WorkRow]:
        return [
            WorkRow(position=0, kind=WorkKind.PUBLISH, exchange=b"x" * 256, routing_key=b"", properties=EMPTY, body=b"")
        ]

    async def assign(unit: Unit, _replays: Sequence[Replay]) -> None:
        """The log of this test stores nothing."""

    try:
        await commits.ready(60)
        for _ in range(CHANNELS + 1):
            unit = commits.next_unit()
            phase = PhaseTwo(
                branch_id=uuid4(), vhost="/", unit=unit, progress=UnitProgress.UNSENT, size=1, work=work, assign=assign
            )
            result = await commits.apply(phase)
            assert isinstance(result, Refused)
            assert "short string of 256 bytes" in result.reason
            assert not result.partial
        assert commits.under_way == 0
    finally:
        await commits.close()
