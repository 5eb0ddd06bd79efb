"""Which branches are meant: one filter for the API, its pages and the command line.

It needs no manager and no web framework: commands that look into the database load it, too.
"""

from typing import Annotated
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from dtx.log.pages import BranchFilter, gtrid_pattern
from dtx.log.records import LogState

Name = Annotated[str, Field(max_length=255, pattern=r"^[^\x00]*$")]
"""Of a user, a virtual host, a queue; a NUL is nowhere in the database, and cannot be asked for."""


class FilterForm(BaseModel):
    """Which branches are meant; what is left out is every."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: list[str] = Field(default_factory=list, max_length=10)
    vhost: Name | None = None
    owner: Name | None = None
    format_id: int | None = Field(default=None, ge=0, le=0xFFFFFFFF)
    branch: list[UUID] = Field(default_factory=list, max_length=1000, description="Ids: one of these.")
    gtrid: str | None = Field(default=None, max_length=260, description="order-*, or hex:6f72*")
    queue: str | None = Field(default=None, description="Consumed from it, or publishes to it.")
    exchange: str | None = None
    older_than: float | None = Field(default=None, ge=0, le=1e9, description="Seconds since the start, at least.")
    stuck: bool | None = None

    def wanted(self, rm: str) -> BranchFilter:
        """The same in terms of the log of *rm*.

        Raises:
            ValueError: an unknown state, or a pattern that is none.
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
