"""A second, simple model of one branch: no table and no effects, only what a peer expects.

It gives the answer of each operation and the place of each message. *luck* is the result of an operation: ``well``;
``not`` and ``partly`` (not all consumed messages were taken); ``silence`` (no answer from the broker); ``stuck``
(phase two failed).
"""

from dataclasses import dataclass, field
from typing import Final

BAD_LUCK: Final = ("silence", "stuck")
"""Phase two does not finish."""


@dataclass
class Reference:
    """One xid as its users see it.

    Args:
        stage: nobody, open, taking, ready, going, undoing.
        one_phase: taking for a one-phase commit.
        doom: the answer of a doomed branch, else empty.
        on, parked: channels that work in the branch, and channels that suspended it.
        consumed, published: messages of the branch.
        visible: messages that consumers can get. finished: consumed for good.
        timeout, deadline: the timeout as set, and when it is due; ``None`` for never.
    """

    stage: str = "nobody"
    one_phase: bool = False
    doom: str = ""
    on: set[int] = field(default_factory=set)
    parked: set[int] = field(default_factory=set)
    consumed: set[str] = field(default_factory=set)
    published: set[str] = field(default_factory=set)
    visible: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    timeout: int = 0
    deadline: float | None = None

    # -- calls of channels

    def start(self, channel: int, timeout: int, now: float) -> str:
        if self.stage != "nobody":
            return "530"
        self.stage = "open"
        self.on = {channel}
        self.timeout = timeout
        self.deadline = now + timeout if timeout else None
        return "xa-ok"

    def join(self, channel: int) -> str:
        if self.stage == "nobody":
            return "404"
        if self.stage != "open" or channel in self.on | self.parked:
            return "503"
        if self.doom:
            return "xa-rbrollback"
        self.on.add(channel)
        return "xa-ok"

    def resume(self, channel: int) -> str:
        if self.stage == "nobody":
            return "404"
        if self.stage != "open" or channel not in self.parked:
            return "503"
        self.parked.remove(channel)
        if self.doom:
            self._drop_what_a_doomed_branch_holds()
            return "xa-rbrollback"
        self.on.add(channel)
        return "xa-ok"

    def end(self, channel: int, how: str) -> str:
        if self.stage == "nobody":
            return "404"
        if self.stage != "open" or channel not in self.on | self.parked:
            return "503"
        if how == "suspend" and channel in self.parked:
            return "503"
        self.on.discard(channel)
        self.parked.discard(channel)
        if how == "fail" and not self.doom:
            self.make_rollback_only()
        if self.doom:
            self._drop_what_a_doomed_branch_holds()
            return self.doom
        if how == "suspend":
            self.parked.add(channel)
        return "xa-ok"

    # -- calls of the transaction manager

    def prepare(self, luck: str) -> str:
        if self.stage == "taking" and not self.one_phase:
            return self._take(luck)
        refusal = self._refuse_unless("open")
        if refusal:
            return refusal
        if self.doom:
            return self._roll_back(self.doom)
        if not self.published and not self.consumed:
            return self._forget("xa-rdonly")
        self.deadline = None
        if not self.consumed:
            self.stage = "ready"
            return "xa-ok"
        self.stage, self.one_phase = "taking", False
        return self._take(luck)

    def one_phase_commit(self, luck: str) -> str:
        if self.stage == "taking" and self.one_phase:
            return self._take(luck)
        if self.stage == "going":
            return self._go(luck)
        refusal = self._refuse_unless("open")
        if refusal:
            return refusal
        if self.doom:
            return self._roll_back(self.doom)
        if not self.published and not self.consumed:
            return self._forget("xa-ok")
        self.deadline = None
        if not self.consumed:
            self.stage = "going"
            return self._go(luck)
        self.stage, self.one_phase = "taking", True
        return self._take(luck)

    def commit(self, luck: str) -> str:
        refusal = self._refuse_unless("ready", "going")
        return refusal or self._go(luck)

    def rollback(self, luck: str) -> str:
        refusal = self._refuse_unless("open", "taking", "ready", "undoing")
        if refusal:
            return refusal
        if self.stage == "open":
            return self._roll_back("xa-rbtimeout" if self.doom == "xa-rbtimeout" else "xa-ok")
        if not self.consumed:
            return self._roll_back("xa-ok")  # no message returns to a queue
        self.stage = "undoing"
        return "541" if luck in BAD_LUCK else self._roll_back("xa-ok")

    def forget(self) -> str:
        return self._refuse_unless()

    def set_timeout(self, seconds: int, now: float) -> str:
        if self.stage == "nobody":
            return "404"
        self.timeout = seconds
        if self.stage == "open" and not self.doom:
            self.deadline = now + seconds if seconds else None
        return "xa-ok"

    # -- other events

    def time_passes(self, now: float) -> None:
        if self.deadline is not None and now >= self.deadline:
            self.doom = "xa-rbtimeout"
            self.deadline = None
            self._drop_work()

    def make_rollback_only(self) -> None:
        if self.stage == "open" and not self.doom:
            self.doom = "xa-rbrollback"
            self.deadline = None
        if self.stage == "open" and self.doom:
            self._drop_what_a_doomed_branch_holds()

    def lose_channel(self, channel: int) -> None:
        if channel in self.on | self.parked:
            self.on.discard(channel)
            self.parked.discard(channel)
            self.make_rollback_only()

    def expire(self) -> None:
        if self.stage == "open" and self.doom and not self.on | self.parked:
            self._forget("")

    # -- messages

    def _take(self, luck: str) -> str:
        if luck == "not":
            return self._roll_back("xa-rbrollback")
        if luck == "partly":
            return self._roll_back("xa-rbrollback")
        if luck == "partly, then stuck":
            self.stage = "undoing"
            return "xa-rbrollback"
        if luck == "silence":
            return "541"
        if not self.one_phase:
            self.stage = "ready"
            return "xa-ok"
        return self._go(luck)

    def _go(self, luck: str) -> str:
        self.stage = "going"
        if self.published and luck in BAD_LUCK:
            return "541"
        self.visible |= self.published
        self.finished |= self.consumed
        self.published, self.consumed = set(), set()
        return self._forget("xa-ok")

    def _roll_back(self, answer: str) -> str:
        self._drop_work()
        return self._forget(answer)

    def _drop_what_a_doomed_branch_holds(self) -> None:
        if not self.on | self.parked:
            self._drop_work()

    def _drop_work(self) -> None:
        self.visible |= self.consumed
        self.published, self.consumed = set(), set()

    def _forget(self, answer: str) -> str:
        self.stage, self.doom, self.one_phase = "nobody", "", False
        self.timeout, self.deadline = 0, None
        return answer

    def _refuse_unless(self, *stages: str) -> str:
        if self.stage == "nobody":
            return "404"
        if self.stage not in stages or self.on | self.parked:
            return "503"
        return ""
