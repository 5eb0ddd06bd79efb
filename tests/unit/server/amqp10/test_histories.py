"""The end of each message after random steps of a client with transactions, links and sessions.

A model follows the text of the specification: who has a delivery, which outcome belongs to which transaction, and what
has been posted. At the end all is decided and the client is gone. Each message is then in its queue exactly once or
consumed, as in the model. The model knows nothing of branches, windows and the internals of links.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.manager import Requester
from dtx.server.standalone.client import Parts
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.coordination import PROMOTE
from dtx.wire.amqp10.endpoint import Closed, Delivered, Detached, Ended, Event
from dtx.wire.amqp10.link import Link, Outgoing
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    Accepted,
    Declare,
    Declared,
    DeliveryState,
    Discharge,
    Modified,
    Outcome,
    Rejected,
    Role,
    TransactionalState,
    Transfer,
)
from dtx.wire.amqp10.session import Session
from dtx.wire.amqp10.values import Described
from dtx.xa.codes import XaFlag
from dtx.xa.model import Operation, State
from dtx.xa.xid import Xid
from tests.evidence.fuzz.server import check_nothing_is_left, leave, whole
from tests.unit.manager.requests import answer_of
from tests.unit.server.amqp10.inside import Inside

pytestmark = pytest.mark.usefixtures("one_slice")

WHO: Final = Requester("guest", "/")
QUEUES: Final = "a", "b"
FIRST: Final = 6
"""Messages in each queue at the start."""
OUTCOMES: Final = (
    ACCEPTED,
    RELEASED,
    Rejected(),
    Modified(delivery_failed=True),
    Modified(undeliverable_here=True),
    None,
)
Place = tuple[int, int]


@dataclass(eq=False)
class Branch:
    """A branch of the transaction manager."""

    xid: Xid
    parts: list["Txn"] = field(default_factory=list)


@dataclass(eq=False)
class Txn:
    """A transaction, and its work before the decision."""

    txn_id: bytes
    control: Place
    branch: Branch | None = None
    alive: bool = True
    """It has not been discharged, and its control link is attached."""
    doomed: bool = False
    """Its work is rolled back."""
    hopeless: bool = False
    """Its discharge will roll back: a discharge was refused before, because of a partial delivery."""
    ended: bool = False
    """It was discharged successfully, and its branch decides."""
    posts: list[str] = field(default_factory=list)
    taken: list["Taken"] = field(default_factory=list)
    partial: bool = False


@dataclass(eq=False)
class Taken:
    """A delivery that the client holds."""

    body: str
    session: int
    link: int
    number: int
    acquired: Txn | None
    retired: Txn | None = None
    outcome: Outcome = RELEASED


def consumes(outcome: Outcome) -> bool:
    """Whether the outcome removes the message: no queue here has a dead-letter exchange."""
    return isinstance(outcome, Accepted | Rejected) or (isinstance(outcome, Modified) and outcome.undeliverable_here)


class History:
    """One client, and the model of its steps.

    Args:
        parts: parts of the server.
        dice: chooses the steps.
    """

    def __init__(self, parts: Parts, dice: random.Random) -> None:
        self.parts = parts
        self.dice = dice
        self.client = Inside(parts)
        self.told: list[str] = []
        self.there: set[str] = set()
        self.either: set[str] = set()
        """Messages that the client consumed again after a doomed transaction retired them: both ends are right."""
        self.txns: list[Txn] = []
        self.branches: list[Branch] = []
        self.taken: dict[Place, Taken] = {}
        """Deliveries by session and delivery id."""
        self.sessions: list[Session] = []
        self.controls: list[tuple[Session, Link]] = []
        self.senders: list[tuple[Session, Link, str]] = []
        self.receivers: list[tuple[Session, Link, str]] = []
        self.fresh: list[Delivered] = []
        """Deliveries of this step. The model handles them after the step."""
        self.partials: dict[Place, tuple[Txn | None, str]] = {}
        self._names = iter(range(1 << 30))

    def note(self, text: str) -> None:
        self.told.append(text)

    def name(self, kind: str) -> str:
        return f"{kind}-{next(self._names)}"

    # -- events

    async def turn(self) -> list[Event]:
        events = await self.client.turn()
        for event in events:
            match event:
                case Delivered():
                    self.fresh.append(event)
                case Detached():
                    place = event.session, event.link
                    self.note(f"  detached {place}: {event.error}")
                    if event.by_peer:
                        session = self.client.engine.session(event.session)
                        link = None if session is None else session.link(event.link)
                        if link is not None:
                            link.detach()
                    self._gone(place)
                case Ended() | Closed():
                    assert event.error is None, event
                case _:
                    pass
        return events

    def _delivered(self, event: Delivered) -> None:
        body = bytes(b"".join(message.read(event.payload).data or ())).decode()
        named = [self._of(state.txn_id) for state in event.states if isinstance(state, TransactionalState)]
        acquired = named[0] if named else None
        self.note(f"  got {body} as {event.session}/{event.delivery_id}, settled {event.settled}, {acquired}")
        assert body in self.there, "it was consumed, or never sent"
        taken = Taken(body, event.session, event.link, event.delivery_id, acquired)
        if not event.settled:
            if (event.session, event.link) not in {(one[0].channel, one[1].handle) for one in self.receivers}:
                return  # the link is gone
            self.taken[event.session, event.delivery_id] = taken
        elif acquired is None:
            self.there.discard(body)
        else:
            self._retire(taken, acquired, ACCEPTED)

    def _of(self, txn_id: bytes) -> Txn:
        return next(txn for txn in self.txns if txn.txn_id == txn_id)

    def _gone(self, place: Place) -> None:
        """Remove a link, and what belongs to it."""
        self.controls = [one for one in self.controls if (one[0].channel, one[1].handle) != place]
        self.senders = [one for one in self.senders if (one[0].channel, one[1].handle) != place]
        self.receivers = [one for one in self.receivers if (one[0].channel, one[1].handle) != place]
        half = self.partials.pop(place, None)
        if half is not None and half[0] is not None:
            half[0].partial = any(txn is half[0] for txn, _ in self.partials.values())
        for key in [key for key, taken in self.taken.items() if (taken.session, taken.link) == place]:
            del self.taken[key]  # retired deliveries stay retired
        for txn in self.txns:
            if txn.alive and txn.control == place:
                self._fail(txn)

    # -- the model

    def _retire(self, taken: Taken, txn: Txn, outcome: Outcome) -> None:
        if txn.alive and not txn.doomed:
            taken.retired, taken.outcome = txn, outcome
            txn.taken.append(taken)
        else:
            taken.retired = None

    def _doom(self, txn: Txn) -> None:
        """Mark it as rolled back. What it has retired stays with it until the discharge reports the rollback."""
        for one in [txn] if txn.branch is None else txn.branch.parts:
            one.doomed = True

    def _fail(self, txn: Txn) -> None:
        self._doom(txn)
        txn.alive = False
        for taken in txn.taken:
            taken.retired = None
        self._back(txn)

    def _back(self, txn: Txn) -> None:
        """Return acquired messages: for the model, they have not been sent."""
        for key in [key for key, taken in self.taken.items() if taken.acquired is txn]:
            del self.taken[key]

    def _commit(self, txn: Txn) -> None:
        self.there.update(txn.posts)
        for taken in txn.taken:
            if consumes(taken.outcome):
                self.there.discard(taken.body)
            self.taken.pop((taken.session, taken.number), None)

    # -- steps

    async def declare(self) -> None:
        if not self.controls:
            return
        session, control = self.dice.choice(self.controls)
        open_ones = [branch for branch in self.branches if not any(part.doomed for part in branch.parts)]
        branch = None
        if self.dice.random() < 0.2:
            branch = self.dice.choice([*open_ones, Branch(Xid(1, self.dice.randbytes(8), b"b"))])
        request = Declare(global_id=None if branch is None else branch.xid.to_wire())
        number = control.send(b"d", message.value(request))
        await self.turn()
        outcome = self.client.outcome(session, number)
        assert isinstance(outcome, Declared), outcome
        txn = Txn(outcome.txn_id, (session.channel, control.handle), branch)
        self.txns.append(txn)
        if branch is not None:
            branch.parts.append(txn)
            self._know(branch)
        self.note(f"  {txn.txn_id.hex()[:6]}")

    def _know(self, branch: Branch) -> None:
        if branch not in self.branches:
            self.branches.append(branch)

    def _some_txn(self, odds: float = 0.8) -> Txn | None:
        alive = [txn for txn in self.txns if txn.alive]
        if self.txns and self.dice.random() < 0.05:
            return self.dice.choice(self.txns)  # it may be over
        return self.dice.choice(alive) if alive and self.dice.random() < odds else None

    async def post(self) -> None:
        free = [one for one in self.senders if (one[0].channel, one[1].handle) not in self.partials]
        if not free:
            return
        session, link, queue = self.dice.choice(free)
        txn, settled, body = self._some_txn(), self.dice.random() < 0.3, self.name(queue)
        self.note(f"  {body} in {txn and txn.txn_id.hex()[:6]}, settled {settled}")
        state = None if txn is None else TransactionalState(txn_id=txn.txn_id)
        payload = message.head(message.Header(durable=True)) + message.data(body.encode())
        number = link.send(body.encode(), payload, state=state, settled=settled)
        await self.turn()
        self._posted(session, number, body, txn, settled=settled)

    def _posted(self, session: Session, number: int | None, body: str, txn: Txn | None, *, settled: bool) -> None:
        outcome = self.client.outcome(session, number)
        if txn is None:
            assert settled or outcome == ACCEPTED, outcome
            self.there.add(body)
        elif not txn.alive:
            assert settled or isinstance(outcome, Rejected), outcome
        else:
            assert settled or outcome == TransactionalState(txn_id=txn.txn_id, outcome=ACCEPTED), outcome
            if not txn.doomed:
                txn.posts.append(body)

    async def post_a_part(self) -> None:
        """Send the first frame of a message, or its last."""
        if self.partials and self.dice.random() < 0.5:
            await self._post_the_rest()
            return
        free = [one for one in self.senders if (one[0].channel, one[1].handle) not in self.partials]
        if not free:
            return
        session, link, queue = self.dice.choice(free)
        txn = self._some_txn()
        if txn is not None and not txn.alive:
            return
        body = self.name(queue)
        number = session._next_delivery
        session._next_delivery += 1
        session._next_outgoing += 1
        session._remote_window -= 1
        link.credit -= 1
        link.delivery_count += 1
        state = None if txn is None else TransactionalState(txn_id=txn.txn_id)
        post = Outgoing(link, next(session._numbers), b"", memoryview(b""), False, None, 0)
        assert post.number == number
        session.outgoing[number] = link.unsettled[number] = post
        session.send(
            Transfer(handle=link.handle, delivery_id=number, delivery_tag=b"%d" % number, state=state, more=True)
        )
        self.partials[session.channel, link.handle] = txn, f"{number} {body}"
        if txn is not None:
            txn.partial = True
        self.note(f"  part of {body} in {txn and txn.txn_id.hex()[:6]}")
        await self.turn()

    async def _post_the_rest(self) -> None:
        place = self.dice.choice(list(self.partials))
        txn, what = self.partials.pop(place)
        number, body = what.split()
        session = next(one for one in self.sessions if one.channel == place[0])
        payload = message.head(message.Header(durable=True)) + message.data(body.encode())
        session.connection.send_transfer(session.channel, {"handle": place[1]}, memoryview(payload))
        session._next_outgoing += 1
        session._remote_window -= 1
        if txn is not None:
            txn.partial = any(other is txn for other, _ in self.partials.values())
        self.note(f"  the rest of {body}")
        await self.turn()
        self._posted(session, int(number), body, txn, settled=False)

    async def credit(self) -> None:
        if not self.receivers:
            return
        _, link, _ = self.dice.choice(self.receivers)
        txn = self._some_txn(0.5)
        count, drain = self.dice.randrange(5), self.dice.random() < 0.1
        self.note(f"  {count} on {link.name} in {txn and txn.txn_id.hex()[:6]}, drain {drain}")
        link.grant(count, drain=drain, properties=None if txn is None else {"txn-id": txn.txn_id})
        await self.turn()

    async def dispose(self) -> None:
        if not self.sessions:
            return
        session = self.dice.choice(self.sessions)
        numbers = sorted(number for channel, number in self.taken if channel == session.channel)
        if not numbers:
            return
        first = self.dice.choice(numbers)
        found = list(range(first, first + self.dice.randrange(1, 8)))  # some are settled or not delivered yet
        if self.dice.random() < 0.3:
            found = found[::2]  # several dispositions
        there = [number for number in found if number in session.incoming]
        mine = [self.taken[session.channel, number] for number in there if (session.channel, number) in self.taken]
        outcome, settled, txn = self.dice.choice(OUTCOMES), self.dice.random() < 0.6, self._some_txn(0.6)
        if txn is None and self.dice.random() < 0.5 and mine:
            txn = mine[0].acquired
        state: DeliveryState | None = outcome
        if txn is not None:
            state = TransactionalState(txn_id=txn.txn_id, outcome=outcome)
        self.note(f"  {[one.body for one in mine]}: {outcome}, {txn and txn.txn_id.hex()[:6]}, settled {settled}")
        runs: list[list[int]] = []
        for number in found:  # each frame is one disposition
            if runs and runs[-1][-1] == number - 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        for run in runs:
            known = [one for one in mine if one.number in run and one.number in session.incoming]
            session.dispose(Role.RECEIVER, run, state, settled=settled)
            told = await self.turn()
            ended = {(one.session, one.link) for one in told if isinstance(one, Detached)}
            for one in known:
                # A rollback that the disposition caused may have taken back some of them.
                if (one.session, one.link) not in ended and self.taken.get((one.session, one.number)) is one:
                    self._disposed(one, outcome, txn, settled=settled)

    def _disposed(self, taken: Taken, outcome: Outcome | None, txn: Txn | None, *, settled: bool) -> None:
        if outcome is None and not settled:
            return
        if taken.retired is not None and taken.retired.doomed and consumes(outcome or RELEASED):
            self.either.add(taken.body)
        if txn is not None:
            if taken.retired is None:
                self._retire(taken, txn, outcome or RELEASED)  # unless it is over or another link is detached
        elif taken.retired is None and taken.acquired is not None and taken.acquired.alive:
            assert outcome is None, "the link must be detached"
            self._retire(taken, taken.acquired, RELEASED)
        elif taken.retired is None and consumes(outcome or RELEASED):
            self.there.discard(taken.body)
        if settled or (txn is None and taken.retired is None):
            self.taken.pop((taken.session, taken.number), None)

    async def discharge(self) -> None:
        alive = [txn for txn in self.txns if txn.alive]
        if not alive or not self.controls:
            return
        txn, fail = self.dice.choice(alive), self.dice.random() < 0.3
        session, control = self.dice.choice(self.controls)
        place = session.channel, control.handle
        partial = any(one is txn for one, _ in self.partials.values())
        self.note(f"  {txn.txn_id.hex()[:6]} fail {fail}, partial {partial}, doomed {txn.doomed}")
        number = control.send(b"d", message.value(Discharge(txn_id=txn.txn_id, fail=fail)))
        await self.turn()
        outcome = self.client.outcome(session, number)
        if partial and not fail:
            assert outcome is None
            assert place not in {(one.channel, link.handle) for one, link in self.controls}
            if txn.alive:  # another control link declared it
                txn.hopeless = True
            return
        if outcome == ACCEPTED and not fail:
            assert not txn.doomed
            assert not txn.hopeless
            txn.alive = False
            if txn.branch is None:
                self._commit(txn)
            else:
                txn.ended = True
                for taken in txn.taken:
                    self.taken.pop((taken.session, taken.number), None)
            for taken in self.taken.values():
                if taken.acquired is txn:
                    taken.acquired = None  # the client holds it
            return
        assert fail or txn.doomed or txn.hopeless, outcome
        assert outcome == ACCEPTED or isinstance(outcome, Rejected), outcome
        self._fail(txn)

    async def promote(self) -> None:
        alive = [txn for txn in self.txns if txn.alive and txn.branch is None]
        if not alive or not self.controls:
            return
        txn = self.dice.choice(alive)
        session, control = self.dice.choice(self.controls)
        open_ones = [branch for branch in self.branches if not any(part.doomed for part in branch.parts)]
        branch = self.dice.choice([*open_ones, Branch(Xid(1, self.dice.randbytes(8), b"b"))])
        both = Described(PROMOTE, [txn.txn_id, branch.xid.to_wire()])
        number = control.send(b"p", message.value(Declare(global_id=both)))
        await self.turn()
        outcome = self.client.outcome(session, number)
        self.note(f"  {txn.txn_id.hex()[:6]}: {outcome}")
        if isinstance(outcome, Declared):
            assert not txn.doomed
            txn.branch = branch
            branch.parts.append(txn)
            self._know(branch)
        elif not txn.hopeless:
            self._doom(txn)

    async def decide(self) -> None:
        """The transaction manager completes a branch without open transactions."""
        done = [one for one in self.branches if not any(part.alive for part in one.parts)]
        if not done:
            return
        branch = self.dice.choice(done)
        self.branches.remove(branch)
        manager = self.parts.manager
        doomed, how = any(part.doomed for part in branch.parts), self.dice.randrange(3)
        self.note(f"  {branch.xid} {how}, doomed {doomed}")
        if how == 0:
            await answer_of(manager, WHO, branch.xid, Operation.ROLLBACK)
            flag = None
        elif how == 1:
            flag = await answer_of(manager, WHO, branch.xid, Operation.ONE_PHASE)
        else:
            flag = await answer_of(manager, WHO, branch.xid, Operation.PREPARE)
            if flag is XaFlag.OK:
                flag = await answer_of(manager, WHO, branch.xid, Operation.COMMIT)
        await self.turn()
        self.note(f"  {flag}")
        if flag in (XaFlag.OK, XaFlag.RDONLY):
            assert not doomed
            for part in branch.parts:
                self._commit(part)
        else:
            assert flag is None or doomed, flag

    async def doom(self) -> None:
        """Time out a transaction, or lose a part of its work. The client's next step may come in the same turn."""
        alive = [txn for txn in self.txns if txn.alive]
        if not alive:
            return
        txn, is_late = self.dice.choice(alive), self.dice.random() < 0.7
        manager, entry = self.parts.manager, self.client.server.transactions._works[txn.txn_id].entry
        self.note(f"  {txn.txn_id.hex()[:6]}, late {is_late}")
        if not is_late:
            manager.doom(entry, "the test wants it")
        elif not entry.busy and entry.branch.state is State.ACTIVE:
            manager._upkeep._begin(entry, Operation.TIMEOUT)
        self._doom(txn)
        if self.dice.random() < 0.3:
            await self.turn()

    async def attach(self) -> None:
        """Attach links of random kinds, on a random session."""
        if len(self.sessions) < 3 and self.dice.random() < 0.4:
            self.sessions.append(await self._begin())
        if not self.sessions:
            return
        session, queue = self.dice.choice(self.sessions), self.dice.choice(QUEUES)
        for kind in self.dice.sample(("control", "sender", "receiver"), self.dice.randrange(1, 4)):
            if kind == "control" and len(self.controls) < 3:
                link = await self.client.control(session, self.name(kind))
                self.controls.append((session, link))
            elif kind == "sender" and len(self.senders) < 4:
                self.senders.append((session, await self.client.sender(session, queue, self.name(kind)), queue))
            elif kind == "receiver" and len(self.receivers) < 4:
                settled = self.dice.random() < 0.2
                link = await self.client.receiver(session, queue, self.name(kind), settled=settled)
                self.receivers.append((session, link, queue))

    async def _begin(self) -> Session:
        return await self.client.begin()

    @property
    def _links(self) -> list[tuple[Session, Link]]:
        return [*self.controls, *((one[0], one[1]) for one in (*self.senders, *self.receivers))]

    async def detach(self) -> None:
        if not self._links:
            return
        session, link = self.dice.choice(self._links)
        self.note(f"  {link.name}")
        self._gone((session.channel, link.handle))
        link.detach()
        await self.turn()

    async def end(self) -> None:
        """End a session, with all its links."""
        if not self.sessions or self.dice.random() < 0.5:
            return
        session = self.sessions.pop(self.dice.randrange(len(self.sessions)))
        self.note(f"  {session.channel}")
        for one, link in self._links:
            if one is session:
                self._gone((session.channel, link.handle))
        session.end()
        await self.turn()

    # -- the run

    async def play(self, steps: int) -> None:
        """Run *steps* random steps, then complete everything."""
        await self.client.open()
        await self.attach()
        for queue in QUEUES:
            session = await self._begin()
            link = await self.client.sender(session, queue, self.name("first"))
            for _ in range(FIRST):
                body = self.name(queue)
                self.there.add(body)
                link.send(body.encode(), message.head(message.Header(durable=True)) + message.data(body.encode()))
            await self.turn()
            session.end()
            await self.turn()
        weights = {
            self.attach: 6,
            self.declare: 5,
            self.post: 8,
            self.post_a_part: 3,
            self.credit: 8,
            self.dispose: 12,
            self.discharge: 5,
            self.promote: 2,
            self.decide: 2,
            self.doom: 2,
            self.detach: 2,
            self.end: 1,
        }
        for step in self.dice.choices(list(weights), list(weights.values()), k=steps):
            self.note(step.__name__)
            self.client.events.clear()  # delivery ids are used again by other sessions
            await step()
            fresh, self.fresh = self.fresh, []
            for event in fresh:
                self._delivered(event)
        for txn in self.txns:
            if txn.alive:
                self._fail(txn)
        await leave(self.client.server, self.parts.manager, lambda: getattr(self.client.server.nodes, "writes", None))
        while self.branches:
            await self.decide()

    async def left(self) -> Counter[str]:
        """The messages in the queues, as the next client receives them."""
        reader = await Inside(self.parts).open()
        session = await reader.begin()
        for queue in QUEUES:
            link = await reader.receiver(session, queue, queue)
            link.grant(1000, drain=True)
            await reader.turn()
        found = Counter(
            bytes(b"".join(message.read(event.payload).data or ())).decode() for event in reader.among(Delivered)
        )
        await leave(reader.server, self.parts.manager, lambda: getattr(reader.server.nodes, "writes", None))
        return found


async def live(seed: int, steps: int) -> None:
    async with whole() as (parts, store):
        for queue in QUEUES:
            store.virtual_host("/").declare_queue(queue.encode(), None, durable=True)
        history = History(parts, random.Random(seed))
        try:
            await history.play(steps)
            found = await history.left()
            assert found - Counter(history.either) == Counter(history.there - history.either)
            check_nothing_is_left(history.client.server, parts.manager, store)
        except BaseException as error:
            error.add_note("\n".join([f"seed {seed}:", *history.told]))
            raise


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32))
async def test_each_message_is_where_its_last_outcome_has_put_it(seed: int) -> None:
    await live(seed, 60)


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("outcome", [ACCEPTED, RELEASED])
async def test_a_late_outcome_counts_while_others_use_the_branch(outcome: Outcome, settled: bool) -> None:
    """The delivery is held until no one works for the branch. The outcome that its client sent before then counts."""
    async with whole() as (parts, store):
        store.virtual_host("/").declare_queue(b"a", None, durable=True)
        client = await Inside(parts).open()
        session = await client.begin()
        control = await client.control(session)
        xid = Xid(1, b"branch", b"b")
        first, second = [await client.declare(session, control, xid.to_wire()) for _ in range(2)]
        sender, receiver = await client.sender(session, "a"), await client.receiver(session, "a")
        sender.send(b"t", message.head(message.Header(durable=True)) + message.data(b"one"))
        receiver.grant(1)
        await client.turn()
        (got,) = client.among(Delivered)
        retired = TransactionalState(txn_id=first, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [got.delivery_id], retired, settled=False)
        assert await client.ask(session, control, Discharge(txn_id=first, fail=True)) == ACCEPTED
        session.dispose(Role.RECEIVER, [got.delivery_id], outcome, settled=settled)
        await client.turn()
        assert (got.delivery_id in session.incoming) is not settled
        assert isinstance(await client.ask(session, control, Discharge(txn_id=second)), Rejected)
        assert got.delivery_id not in session.incoming
        receiver.grant(1)
        await client.turn()
        assert len(client.among(Delivered)) == (1 if outcome == ACCEPTED else 2)
        await leave(client.server, parts.manager, lambda: getattr(client.server.nodes, "writes", None))
        check_nothing_is_left(client.server, parts.manager, store)
