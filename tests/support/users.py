"""One interface to the users of both kinds of server, and helpers for refusals."""

from typing import Protocol

from dtx.auth.users import AccountEditor
from dtx.wire.amqp09 import methods
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient
from tests.support.service import DtxService


class Users(Protocol):
    """Changes users. The changes apply to connections that are opened later."""

    def url(self, user: str = "guest", password: str | None = None, vhost: str = "/") -> str:
        """The URL for *user*; the password is the name unless given."""

    def add(self, user: str, *tags: str) -> None:
        """Add a user without access to any virtual host."""

    def permit(self, user: str, configure: str = ".*", write: str = ".*", read: str = ".*") -> None:
        """Set the permissions of *user* in ``/``."""

    def permit_topic(self, user: str, exchange: str, write: str = ".*", read: str = ".*") -> None:
        """Set the routing keys that *user* may use at a topic exchange of ``/``."""

    def lift_topics(self, user: str) -> None:
        """Remove the topic permissions of *user*."""

    def revoke(self, user: str) -> None:
        """Remove the access of *user* to ``/``."""

    def renew(self, user: str, password: str) -> None:
        """Change the password of *user*."""

    def remove(self, user: str) -> None:
        """Remove *user*."""


class RabbitUsers:
    """The users of a RabbitMQ node."""

    def __init__(self, node: RabbitNode) -> None:
        self._node = node

    def url(self, user: str = "guest", password: str | None = None, vhost: str = "/") -> str:
        return self._node.url(user, password, vhost)

    def add(self, user: str, *tags: str) -> None:
        self._node.api("PUT", f"/api/users/{user}", {"password": user, "tags": ",".join(tags)})

    def permit(self, user: str, configure: str = ".*", write: str = ".*", read: str = ".*") -> None:
        self._node.set_permissions(user, configure=configure, write=write, read=read)

    def permit_topic(self, user: str, exchange: str, write: str = ".*", read: str = ".*") -> None:
        body = {"exchange": exchange, "write": write, "read": read}
        self._node.api("PUT", f"/api/topic-permissions/%2F/{user}", body)

    def lift_topics(self, user: str) -> None:
        self._node.api("DELETE", f"/api/topic-permissions/%2F/{user}")

    def revoke(self, user: str) -> None:
        self._node.api("DELETE", f"/api/permissions/%2F/{user}")

    def renew(self, user: str, password: str) -> None:
        self._node.api("PUT", f"/api/users/{user}", {"password": password, "tags": ""})

    def remove(self, user: str) -> None:
        self._node.delete_user(user)


class StandaloneUsers:
    """The users of a service without a broker."""

    def __init__(self, service: DtxService) -> None:
        assert service.database is not None
        self._service = service
        self._editor = AccountEditor(service.database, "dtx")

    def url(self, user: str = "guest", password: str | None = None, vhost: str = "/") -> str:
        return self._service.url(user, password, vhost)

    def add(self, user: str, *tags: str) -> None:
        self._editor.add_user(user, user.encode(), tags)

    def permit(self, user: str, configure: str = ".*", write: str = ".*", read: str = ".*") -> None:
        self._editor.grant(user, "/", configure=configure, write=write, read=read)

    def permit_topic(self, user: str, exchange: str, write: str = ".*", read: str = ".*") -> None:
        self._editor.grant_topic(user, "/", exchange, write=write, read=read)

    def lift_topics(self, user: str) -> None:
        self._editor.revoke_topic(user, "/")

    def revoke(self, user: str) -> None:
        self._editor.revoke(user, "/")

    def renew(self, user: str, password: str) -> None:
        self._editor.set_password(user, password.encode())

    def tag(self, user: str, *tags: str) -> None:
        """Replace the tags of *user*."""
        self._editor.set_tags(user, tags)

    def remove(self, user: str) -> None:
        self._editor.remove_user(user)


def refusal(client: RawClient, frames: bytes) -> methods.ChannelClose | None:
    """The channel exception that *frames* cause on channel 1; ``None`` if there is none."""
    client.open(1)
    client.send_raw(frames)
    client.say(1, methods.BasicQos(0, 0).encode())  # allowed for every user; it marks the end of the frames
    while True:
        payload = client.next_method(1)
        key = int.from_bytes(payload[:4], "big")
        if key == methods.ChannelClose.KEY:
            client.say(1, methods.ChannelCloseOk().encode())
            return methods.ChannelClose.decode(payload)
        if key == methods.BasicQosOk.KEY:
            client.say(1, methods.ChannelClose(200, b"done").encode())
        elif key == methods.ChannelCloseOk.KEY:
            return None


def outcome(client: RawClient, frames: bytes) -> int:
    """The code of the channel exception that *frames* cause; 0 if there is none."""
    close = refusal(client, frames)
    return 0 if close is None else close.reply_code
