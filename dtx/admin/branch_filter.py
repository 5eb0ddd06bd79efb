"""The filter for branches of the API, its pages and the command line.

It imports no manager and no web framework, because commands that only read the database load it, too.
"""

from typing import Annotated
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from dtx.log.pages import BranchFilter, gtrid_pattern
from dtx.log.records import LogState

Name = Annotated[str, Field(max_length=255, pattern=r"^[^\x00]*$")]
"""The name of a user, a virtual host or a queue. The database cannot contain NUL, so it is refused."""


class FilterForm(BaseModel):
    """A filter for branches. Fields that are left out do not restrict it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: list[str] = Field(default_factory=list, max_length=10, description="Only these states.")
    vhost: Name | None = Field(default=None, description="Virtual host.")
    owner: Name | None = Field(default=None, description="User that started the branch.")
    format_id: int | None = Field(default=None, ge=0, le=0xFFFFFFFF, description="Format id of the xid.")
    branch: list[UUID] = Field(default_factory=list, max_length=1000, description="Only these ids.")
    gtrid: str | None = Field(
        default=None, max_length=260, description="A pattern: `order-*`, or `hex:6f72*` in hexadecimal."
    )
    queue: str | None = Field(default=None, description="Branches that consumed from this queue or publish to it.")
    exchange: str | None = Field(default=None, description="Branches that publish to this exchange.")
    older_than: float | None = Field(default=None, ge=0, le=1e9, description="Minimum age in seconds.")
    stuck: bool | None = Field(default=None, description="Only branches that are stuck, or that are not.")

    def wanted(self, rm: str) -> BranchFilter:
        """The filter for the log of *rm*.

        Raises:
            ValueError: a state is unknown, or a pattern is malformed.
        """
        return BranchFilter(
            rm=rm,
            vhost=self.vhost,
            owner=self.owner,
            format_id=self.format_id,
            states=tuple(LogState(state) for state in self.state),
            ids=tuple(self.branch),
            gtrid=None if self.gtrid is None else gtrid_pattern(self.gtrid),
            queue=None if self.queue is None else self.queue.encode(),
            exchange=None if self.exchange is None else self.exchange.encode(),
            older_than=self.older_than,
            stuck=self.stuck,
        )
