"""What the API says and takes about users and virtual hosts."""

import binascii
from base64 import b64decode
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dtx.admin.forms import Form
from dtx.store.postgres.permissions import Patterns, TopicPatterns
from dtx.store.postgres.users import User

Word = Annotated[str, Field(max_length=255)]
Pattern = Annotated[str | None, Field(max_length=4096)]
Tag = Literal["monitoring", "operator", "administrator", "impersonator"]


class Change(Form):
    """What changes users may say why."""

    reason: Annotated[str, Field(max_length=2000)] = Field(default="", description="Why; goes into the trail.")


class NamedForm(Change):
    """A user or virtual host that there is, or is to be."""

    name: Word


class PasswordForm(NamedForm):
    """A user's new password."""

    password: Annotated[str, Field(max_length=2048, repr=False)]
    encoding: Literal["utf-8", "base64"] = Field(default="utf-8", description="base64: of what is no text.")

    @model_validator(mode="after")
    def _octets(self) -> Self:
        _ = self.octets
        return self

    @property
    def octets(self) -> bytes:
        """The password itself.

        Raises:
            ValueError: it is not encoded so.
        """
        if self.encoding == "utf-8":
            return self.password.encode()
        try:
            return b64decode(self.password, validate=True)
        except binascii.Error:
            raise ValueError("the password is not base64") from None  # and not what it is


class NewUser(PasswordForm):
    """A user to make."""

    tags: list[Tag] = Field(default_factory=list)


class TagsForm(NamedForm):
    """A user's tags from now on."""

    tags: list[Tag]


class PlaceForm(NamedForm):
    """A user in a virtual host."""

    vhost: Word = "/"


class GrantForm(PlaceForm):
    """What a user may do in a virtual host: regular expressions. What is null stays as it was, at first nothing."""

    configure: Pattern = None
    write: Pattern = None
    read: Pattern = None


class TopicGrantForm(PlaceForm):
    """With which routing keys a user may use a topic exchange: regular expressions. What is null stays as it was."""

    exchange: Word
    write: Pattern = None
    read: Pattern = None


class TopicPlaceForm(PlaceForm):
    """A user at a topic exchange."""

    exchange: Word | None = Field(default=None, description="null: at all of them.")


class PermissionForm(Form):
    """What a user may do in a virtual host."""

    vhost: str
    configure: str
    write: str
    read: str

    @classmethod
    def of(cls, vhost: str, patterns: Patterns) -> "PermissionForm":
        """From the tables."""
        return cls(vhost=vhost, **patterns._asdict())


class TopicPermissionForm(Form):
    """With which routing keys a user may use a topic exchange."""

    vhost: str
    exchange: str
    write: str
    read: str

    @classmethod
    def of(cls, vhost: str, exchange: str, patterns: TopicPatterns) -> "TopicPermissionForm":
        """From the tables."""
        return cls(vhost=vhost, exchange=exchange, **patterns._asdict())


class UserForm(Form):
    """A user."""

    name: str
    tags: list[str]
    permissions: list[PermissionForm]
    topic_permissions: list[TopicPermissionForm]

    @classmethod
    def of(cls, user: User) -> "UserForm":
        """From the tables, without its password."""
        return cls(
            name=user.name,
            tags=sorted(user.tags),
            permissions=[PermissionForm.of(vhost, patterns) for vhost, patterns in user.grants.items()],
            topic_permissions=[TopicPermissionForm.of(*place, patterns) for place, patterns in user.topics.items()],
        )


class DoneForm(Form):
    """It is so now."""

    name: str


class RemovedForm(DoneForm):
    """A user that is gone."""

    branches: int = Field(description="In doubt, that it has started: only a coordinator of dtx can complete them now.")


class LiftedForm(DoneForm):
    """Topic permissions that are gone."""

    exchanges: int = Field(description="At how many exchanges.")


class VhostForm(Form):
    """A virtual host."""

    name: str
