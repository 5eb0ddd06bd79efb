"""Which databases can be read: looked at before a run, so that one that is down costs nobody else the run."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.source.batch import AT_ONCE
from dtx.pipeline.source.errors import SourceAway, SourceError
from dtx.pipeline.source.options import Waits
from dtx.pipeline.source.server import connected


def reachable(sources: Mapping[str, str], *, waits: Waits | None = None) -> tuple[dict[str, str], list[Quarantined]]:
    """The databases that answer and have a journal that this dtx understands, and what is wrong with the others.

    Args:
        sources: URL of each by its configured name.
        waits: how long each may take.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(
            zip(sources, pool.map(lambda item: _look(item[0], item[1], waits or Waits()), sources.items()), strict=True)
        )
    return {name: sources[name] for name, wrong in found.items() if wrong is None}, [
        wrong for wrong in found.values() if wrong is not None
    ]


def _look(name: str, url: str, waits: Waits) -> Quarantined | None:
    count: int | None = None
    try:
        with connected(name, url, waits) as server:
            try:
                server.identity()
            except SourceAway:
                raise
            except SourceError:
                count = server.lines()
                raise
    except SourceAway as error:
        return Quarantined(source=name, item="database", reason=f"it does not answer: {_rest(name, error)}", count=None)
    except SourceError as error:
        return Quarantined(source=name, item="journal", reason=_rest(name, error), count=count, whole=True)
    return None


def _rest(name: str, error: SourceError) -> str:
    return str(error).removeprefix(f"{name}: ")
