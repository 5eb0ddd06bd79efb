"""The order of work and answers on a channel: one method at a time.

A method that waits (for the log, a message body, or earlier publishes) occupies the channel. The engine keeps the
frames behind it, so answers and effects keep their order.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from dtx.log.api import LogError
from dtx.server.standalone.client import Client
from dtx.telemetry import get_logger
from dtx.wire.amqp09.channel import ChannelEngine
from dtx.wire.amqp09.endpoint import EndpointState
from dtx.xa.codes import ReplyCode, XaError

_log = get_logger(part="channel")


class ChannelOrder:
    """The order of one channel's methods, and its answers. The manager uses this object as the channel.

    Args:
        client: the owner of the channel.
        engine: the protocol engine of the channel.
        shut_down: returns everything that the channel holds; called before dtx closes the channel.
    """

    __slots__ = ("_announce", "_client", "_shut_down", "engine", "number")

    def __init__(self, client: Client, engine: ChannelEngine, shut_down: Callable[[], None]) -> None:
        self._client = client
        self._announce = client.outbox.announce
        self._shut_down = shut_down
        self.engine = engine
        self.number = engine.number

    @property
    def place(self) -> tuple[int, int]:
        """Numbers of the connection and the channel."""
        return self._client.connection, self.number

    def is_open(self) -> bool:
        """Whether the channel is still open."""
        return self.engine.state is EndpointState.OPEN

    def send(self, frame: bytes) -> None:
        """Send whole frames to the client. Empty *frame*: send nothing."""
        if frame:
            self.engine.send(frame)
            self._announce(len(frame))

    def send_content(self, frame: bytes, properties: bytes, body: bytes) -> None:
        """Send a method frame with its content."""
        self.engine.send_content(frame, properties, body)
        self._announce(len(frame) + len(properties) + len(body))

    def occupy(self) -> None:
        """Keep later frames of the client until :meth:`finish`."""
        self.engine.hold()

    def finish(self, answer: bytes | XaError = b"", key: int = 0) -> None:
        """Answer the method that occupied the channel, and handle the frames that waited.

        Args:
            answer: the frame, or the error that closes the channel.
            key: class << 16 | method that is answered.
        """
        if isinstance(answer, XaError):
            self.refuse(answer, key)
        else:
            self.send(answer)
        self.engine.release()
        self._client.handle_waiting()

    def after_writes(self, act: Callable[[], None], key: int) -> None:
        """Call *act* when all earlier writes of the connection are durable or have failed.

        Args:
            act: may occupy the channel. An XaError that it raises closes the channel.
            key: class << 16 | method that *act* belongs to.
        """
        writes = self._client.writes
        if writes.idle:
            act()
            return
        self.occupy()

        def resume() -> None:
            self.engine.release()
            error: XaError | None = None
            if self.is_open():
                try:
                    act()
                except XaError as refusal:
                    error = refusal
                except Exception as fault:  # noqa: BLE001 - as for methods without a wait
                    self._client.fail(fault, key)
            if not self.engine.held:
                self.finish(error or b"", key)

        writes.then(resume)

    def run(self, work: Coroutine[Any, Any, bytes], key: int) -> None:
        """Run *work*, which returns the answer frame. It continues when the channel is closed."""
        self.occupy()
        self._client.manager.spawn(self._finish_after(work, key))

    async def _finish_after(self, work: Coroutine[Any, Any, bytes], key: int) -> None:
        connection = self._client.connection
        try:
            answer: bytes | XaError = await work
        except XaError as error:
            answer = error
        except LogError as error:
            _log.error("not durable", channel=self.number, connection=connection, reason=str(error))
            answer = XaError(ReplyCode.INTERNAL_ERROR, "the database failed, the outcome is not known")
        except Exception:  # noqa: BLE001 - logged; the client gets no details
            _log.exception("method failed", channel=self.number, connection=connection)
            answer = XaError(ReplyCode.INTERNAL_ERROR, "internal error")
        self.finish(answer, key)

    def refuse(self, error: XaError, key: int = 0) -> None:
        """Close the channel with *error*. The connection stays open."""
        if self.is_open():
            self.refused(error)
            self._shut_down()
            self.engine.refuse(error, key)
            self._announce()

    def refused(self, error: XaError) -> None:
        """Log the reason why the channel is closed."""
        _log.info("channel refused", connection=self._client.connection, channel=self.number, reason=str(error))
