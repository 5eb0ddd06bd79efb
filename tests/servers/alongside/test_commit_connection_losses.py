"""Connections and channels that are lost under phase two: nothing is done twice, and no unit pays for another."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast
from uuid import uuid4

import pytest

from dtx.failpoint import Point
from dtx.log.records import Replay, Unit, WorkKind, WorkRow
from dtx.store.api import Applied, PhaseTwo, Refused, UnitProgress
from dtx.store.rabbitmq.commit_connection import CommitConnection, CommitSettings
from dtx.store.rabbitmq.identity import consumers_of
from dtx.store.rabbitmq.management import Doubts
from dtx.store.rabbitmq.service import Broker, ServiceConnection
from dtx.store.rabbitmq.upstream import Step, Upstream, UpstreamChannelClosed
from dtx.wire.amqp09 import methods
from dtx.xa.codes import ReplyCode, XaError
from tests.support.branches import new_identity
from tests.support.client import bodies, fresh_queue
from tests.support.rabbitmq import RabbitNode

CUTS = 10
"""More connections than a commit connection tries."""


@pytest.fixture
async def commits(rabbitmq: RabbitNode) -> AsyncIterator[CommitConnection]:
    settings = CommitSettings(identity=new_identity("losses"), channels=4, replay="receipts")
    commits = CommitConnection(Broker.from_url(rabbitmq.url()), "/", settings)
    await commits.ready(30)
    yield commits
    await commits.close()


def phase(commits: CommitConnection, kind: WorkKind, queue: str, body: bytes) -> PhaseTwo:
    name = queue.encode()
    publish = kind is WorkKind.PUBLISH
    item = WorkRow(
        position=0, kind=kind, exchange=b"", routing_key=name, queue=None if publish else name,
        properties=b"\x00\x00", body=body,
    )  # fmt: skip

    async def work() -> Sequence[WorkRow]:
        return [item]

    async def assign(_unit: Unit, _replays: Sequence[Replay]) -> None:
        """The log of this test forgets."""

    return PhaseTwo(
        branch_id=uuid4(),
        vhost="/",
        unit=commits.next_unit(),
        progress=UnitProgress.UNSENT,
        size=len(body),
        work=work,
        assign=assign,
    )


class Cutter:
    """Ends connections under units, in front of tx.commit or behind it.

    Args:
        body: units with this one are meant.
        happens: the number of the attempt that gets through to the broker, and whose answer is lost.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, body: bytes, happens: Callable[[int], bool]) -> None:
        self.attempts = 0
        self._body = body
        self._happens = happens
        self._write = Upstream.write_steps
        monkeypatch.setattr(Upstream, "write_steps", lambda *words: self._cut(*words))  # noqa: PLW0108 - bound to it

    def _cut(self, upstream: Upstream, *steps: Step) -> None:
        if steps[0][1] is not Point.UNIT_PUBLISHED or self._body not in b"".join(steps[0][0]):
            self._write(upstream, *steps)
            return
        self.attempts += 1
        if self._happens(self.attempts):
            self._write(upstream, *steps)
            cast("Any", upstream).handle = lambda _: upstream.abort("cut behind commit-ok")
        else:
            self._write(upstream, *steps[:-1])
            upstream.abort("cut before tx.commit")


@pytest.mark.parametrize("kind", list(WorkKind))
async def test_a_unit_whose_last_attempt_happened_is_not_refused(
    commits: CommitConnection, rabbitmq: RabbitNode, monkeypatch: pytest.MonkeyPatch, kind: WorkKind
) -> None:
    """Design: "Only commit-ok (or, after a crash of dtx, a trusted receipt) completes it"."""
    with fresh_queue(rabbitmq) as queue:
        never = Cutter(monkeypatch, b"poison", lambda _: False)
        run = commits.apply if kind is WorkKind.PUBLISH else commits.put_back
        assert isinstance(await run(phase(commits, kind, queue, b"poison")), Refused)
        assert bodies(rabbitmq, queue) == []
        assert never.attempts < CUTS
        last = Cutter(monkeypatch, b"one", lambda attempt: attempt == never.attempts)
        assert isinstance(await run(phase(commits, kind, queue, b"one")), Applied)
        assert last.attempts == never.attempts
        assert bodies(rabbitmq, queue) == [b"one"]


async def test_units_that_shared_a_connection_with_a_fatal_one_succeed(
    commits: CommitConnection, rabbitmq: RabbitNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, loop = Upstream.write_steps, asyncio.get_running_loop()

    def send(upstream: Upstream, *steps: Step) -> None:
        """The broker takes its time for each unit, and ends the connection of the fatal one before that is over."""
        if steps[-1][1] is not Point.UNIT_SENT:
            write(upstream, *steps)
        elif b"poison" in b"".join(steps[0][0]):
            loop.call_later(0.1, upstream.abort, "a fatal unit")
        else:
            loop.call_later(0.2, write, upstream, *steps)

    monkeypatch.setattr(Upstream, "write_steps", send)
    with fresh_queue(rabbitmq) as queue:
        sent = [b"poison", b"one", b"two", b"three"]
        results = await asyncio.gather(*(commits.apply(phase(commits, WorkKind.PUBLISH, queue, body)) for body in sent))
        assert [type(result) for result in results] == [Refused, Applied, Applied, Applied]
        assert sorted(bodies(rabbitmq, queue)) == sorted(sent[1:])


async def close_idle_channels(commits: CommitConnection) -> int:
    """Make the broker close all of them; how many there were."""
    idle = list(commits._free)
    for channel in idle:
        channel.upstream.write(methods.BasicAck(1).frame(channel.number))  # 406, unknown delivery tag
    while any(channel.closed is None for channel in idle):
        await asyncio.sleep(0.01)
    return len(idle)


async def test_channels_that_the_broker_has_closed_are_replaced(
    commits: CommitConnection, rabbitmq: RabbitNode
) -> None:
    """All of them, while nothing was under way: commits would wait for ever."""
    with fresh_queue(rabbitmq) as queue:
        async with asyncio.timeout(30):
            closed = await close_idle_channels(commits)
            result = await commits.apply(phase(commits, WorkKind.PUBLISH, queue, b"one"))
            assert isinstance(result, Applied)
            while commits.channels != closed:
                await asyncio.sleep(0.01)
        assert bodies(rabbitmq, queue) == [b"one"]


async def test_a_caller_that_is_cancelled_leaves_its_channel_to_others(commits: CommitConnection) -> None:
    """Otherwise the channel would be in nobody's hands, and later commits would wait for ever."""
    async with asyncio.timeout(30):
        taken = [await commits._take_channel() for _ in range(commits.channels)]
        waiting = [asyncio.create_task(commits._take_channel()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        commits._give(taken[0])
        waiting[1].cancel()  # it has its channel, and does not know it yet
        await asyncio.wait(waiting)
        for channel in taken[1:]:
            commits._give(channel)
        assert len(commits._free) == len(taken)


async def test_a_connection_without_a_channel_left_is_replaced(
    commits: CommitConnection, rabbitmq: RabbitNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker closes all channels and refuses further ones: commits would wait for ever."""
    first, open_channel = commits._connection, CommitConnection._open_channel

    async def refuse(which: CommitConnection, connection: ServiceConnection) -> None:
        if connection is first:
            raise XaError(ReplyCode.RESOURCE_ERROR, "no channel is left")
        await open_channel(which, connection)

    monkeypatch.setattr(CommitConnection, "_open_channel", refuse)
    with fresh_queue(rabbitmq) as queue:
        async with asyncio.timeout(30):
            await close_idle_channels(commits)
            result = await commits.apply(phase(commits, WorkKind.PUBLISH, queue, b"one"))
        assert isinstance(result, Applied)
        assert bodies(rabbitmq, queue) == [b"one"]


async def test_each_connection_renews_queues_of_predecessors(
    commits: CommitConnection, rabbitmq: RabbitNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that last for less than an hour would leave their queues to expire."""
    renewed = asyncio.Event()

    async def renew(_upstream: Upstream) -> None:
        renewed.set()

    monkeypatch.setattr(commits.receipts, "renew_inherited", renew)
    with fresh_queue(rabbitmq) as queue:
        Cutter(monkeypatch, b"one", lambda attempt: attempt == 1)
        assert isinstance(await commits.apply(phase(commits, WorkKind.PUBLISH, queue, b"one")), Applied)
    async with asyncio.timeout(30):
        await renewed.wait()


async def test_a_possible_repeat_is_remembered_despite_later_errors(
    commits: CommitConnection, rabbitmq: RabbitNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happened, leaves no receipt, and its answer is lost; then the messages cannot be read any more."""
    with fresh_queue(rabbitmq) as queue:
        Cutter(monkeypatch, b"one", lambda attempt: attempt == 1)
        commits._trust.doubts = Doubts(of_publishes="a queue refuses")
        once = phase(commits, WorkKind.PUBLISH, queue, b"one")
        assert not once.unit.receipt
        work = once.work

        async def away() -> Sequence[WorkRow]:
            once.work = gone
            return await work()

        async def gone() -> Sequence[WorkRow]:
            raise XaError(ReplyCode.INTERNAL_ERROR, "the log cannot be read")

        once.work = away
        with pytest.raises(XaError, match="cannot be read"):
            await commits.apply(once)
        assert once.repeated
        assert bodies(rabbitmq, queue) == [b"one"]


async def test_a_queue_that_dtx_cannot_check_may_repeat_its_message(
    commits: CommitConnection, rabbitmq: RabbitNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ 4.2.6 refuses passive declarations (403): the message may have been returned to a lost connection."""
    with fresh_queue(rabbitmq) as queue:

        async def refuse(name: bytes, upstream: Upstream) -> int | None:
            if name == queue.encode():
                raise UpstreamChannelClosed(methods.ChannelClose(403, b"ACCESS_REFUSED"))
            return await consumers_of(name, upstream)

        with monkeypatch.context() as until_refused:
            until_refused.setattr("dtx.store.rabbitmq.commit_connection.consumers_of", refuse)
            Cutter(until_refused, b"one", lambda attempt: attempt == 1)
            assert isinstance(await commits.put_back(phase(commits, WorkKind.CONSUME, queue, b"one")), Refused)
        assert isinstance(await commits.put_back(phase(commits, WorkKind.CONSUME, queue, b"one")), Applied)
        assert bodies(rabbitmq, queue) == [b"one", b"one"]
