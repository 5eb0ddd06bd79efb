"""The steps of a run over a fleet, for the command line and for programs."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import click
from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
from pyspark.sql import SparkSession

from dtx.config import redact
from dtx.pipeline import archive as journals
from dtx.pipeline.decisions import read as read_decisions
from dtx.pipeline.files import Files, LakeError
from dtx.pipeline.fleet import Fleet
from dtx.pipeline.lake import LOCK, LOCK_SECONDS, Lake
from dtx.pipeline.participants import observe, waiting
from dtx.pipeline.progress import Progress
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.reconcile import PublishingFailed, Results, Run, SourcePart, Total, current, publish, run
from dtx.pipeline.report import collect, write_report
from dtx.pipeline.session import SessionOptions, open_session
from dtx.pipeline.source.server import reachable, without_name
from dtx.pipeline.verdicts import Rules, Verdict

__all__ = ["PublishingFailed", "Steps"]

_QUARANTINE: Final = "quarantine.json"
_LOCK: Final = "reconcile.lock"
METRICS: Final = "dtx_pipeline.prom"
"""File of the results with metrics of the last run, for the textfile collector of Prometheus's node_exporter."""


class Steps(ExitStack):
    """Runs the steps for one fleet; the Spark session starts when it is first needed. Use as a context manager.

    *show* is called with each line of output. Steps return what they have not read.
    """

    def __init__(self, fleet: Fleet, options: SessionOptions, *, show: Callable[[str], None] = click.echo) -> None:
        super().__init__()
        self._fleet = fleet
        self._options = options
        self._show_line = show
        self._results = Files(fleet.results)

    @cached_property
    def spark(self) -> SparkSession:
        """The session, see :func:`~dtx.pipeline.session.open_session`."""
        options = self._options
        if options.lines is None:  # the logs of the tables have their numbers of rows
            tables = (Lake(self._fleet.lake).table, Results(self._results.uri).verdicts)
            options = replace(options, lines=sum(int(table.load().count()) for table in tables if table.exists))
        with Progress(None, "starting Spark"):
            return self.enter_context(open_session(options))

    def archive(self, names: Sequence[str], *, again: bool = False) -> list[Quarantined]:
        """Copy new lines of the journals of *names*, or of all databases, into the lake, and join its small files.

        With *again*, the journals are read from the beginning; lines that the lake has are left out.
        """
        sources = self._fleet.sources(tuple(names))
        with Progress(None, "archive") as progress:
            done = journals.archive(self._fleet.lake, sources, again=again, watch=partial(_watch, progress))
            progress.note("joining small files")
            wrong = _maintained(partial(journals.maintain, self._fleet.lake, progress.note))
        unread = _unread(done)
        read = f"{len(done) - len(unread):,} of {len(done):,}" if unread else f"{len(done):,}"
        repeated = sum(result.again for result in done)
        known = f"; {repeated:,} known lines were read again" if repeated else ""
        self._show_line(f"archived {sum(result.rows for result in done):,} new lines of {read} databases{known}")
        self._note("archive", unread, others=[one.name for one in self._fleet.database if one.name not in sources])
        return unread + wrong

    def follow(self, names: Sequence[str], interval: float) -> list[Quarantined]:
        """Archive every *interval* seconds until Ctrl-C. A database that cannot be read is reported at once."""
        sources = self._fleet.sources(tuple(names))
        self._show_line(f"following {len(sources):,} databases; Ctrl-C ends it")
        reported: dict[str, str | None] = {}
        with Progress(None, "archive") as progress:

            def watch(done: Sequence[journals.Archived]) -> None:
                _watch(progress, done)
                for result in done:
                    if result.error != reported.get(result.source):
                        reported[result.source] = result.error
                        progress.print_line(_change(result))

            return _unread(journals.follow(self._fleet.lake, sources, interval=interval, watch=watch))

    def retain(self, before: date, *, dry_run: bool) -> dict[str, int]:
        """Remove lines of the lake, settled verdicts, their history and runs of days before *before*.

        Returns:
            The number of items of each kind, also with *dry_run*, which only counts them.
        """
        lake = Lake(self._fleet.lake)
        with lake.files.alone(LOCK, LOCK_SECONDS), self._results.alone(_LOCK):
            found = {"lines of journals": lake.table.remove_before(before, "at", dry_run=dry_run)}
            state = Results(self._results.uri)
            return found | (state.retain(before, dry_run=dry_run) if state.verdicts.exists else {})

    def reconcile(self, *, full: bool, to_publish: bool) -> list[Quarantined]:
        """Give verdicts, store them, and publish them if the fleet has a database for that.

        With *full*, the whole lake is read again. After :class:`PublishingFailed` the verdicts are stored nevertheless.
        """
        with self._results.alone(_LOCK):
            return self._reconcile(full=full, to_publish=to_publish)

    def report(self, to: Path | None) -> list[Quarantined]:
        """Write the page and the CSV files to a directory of this machine.

        The default is ``report`` in the results if they are local, else in the working directory.
        """
        directory = to or (Path(self._fleet.results) / "report" if self._results.is_local else Path("report"))
        with Progress(self.spark, "report") as progress:
            lake = Lake(self._fleet.lake)
            progress.note("counting messages in open branches")
            there, away = reachable(self._urls())
            done = Results(self._results.uri).last()
            events, _ = lake.frame(self.spark)
            rows = list(dict.fromkeys((*self._noted(), *away, *lake.quarantined)))
            progress.note("counting")
            figures = collect(
                current(self.spark, self._results.uri),
                events,
                waiting(there) if there else None,
                quarantine=rows,
                sources=() if done is None else done.sources,
            )
            progress.note("drawing")
            page = write_report(figures, directory)
        self._show_line(f"report: {page}")
        return rows

    def _reconcile(self, *, full: bool, to_publish: bool) -> list[Quarantined]:
        lake = Lake(self._fleet.lake)
        with Progress(self.spark, "reconcile") as progress:
            archived = {one.name: 0 for one in self._fleet.database} | lake.archived()
            lake.pin()  # before a dtx is asked: a branch open in these lines that it no longer has must have ended
            as_of = time.time_ns() // 1000  # before the reads: all data are at least as new
            progress.note("asking participants for branches in doubt")
            observations, unseen = observe(self.spark, self._urls(), self._fleet.participant)
            decisions, unread = read_decisions(self.spark, self._fleet.decisions)
            away = {row.source for row in unread if row.is_away}
            unasked = {row.source for row in unseen if row.is_away}
            rules = Rules(
                as_of=as_of,
                orphan_after=round(self._fleet.orphan_after.total_seconds() * 1_000_000),
                skew=round(self._fleet.skew.total_seconds() * 1_000_000),
                # a branch is no orphan if its decision may be in a log that was not read
                decisions_read=bool(self._fleet.decisions) and not away,
                asked=frozenset(one.name for one in self._fleet.database if one.name not in unasked),
                archived=archived,
            )
            done = run(
                self.spark,
                lake,
                observations,
                decisions,
                self._results.uri,
                rules,
                logs=[log.name for log in self._fleet.decisions],
                logs_read={log.name for log in self._fleet.decisions} - away,
                participants=[*self._urls(), *(one.name for one in self._fleet.participant)],
                away=unasked,
                full=full,
                note=progress.note,
            )
        self._show_line(
            f"reconciled {done.transactions:,} transactions from {done.lines:,} lines, {done.lines_read:,} of them new"
        )
        for verdict, total in done.totals.items():
            if total.transactions:
                self._show_line(f"  {verdict:<18} {total.transactions:>15,}")
        state = Results(self._results.uri)
        tables = [table for table in (state.verdicts, state.history) if table.exists]
        rows = [row for table in tables for row in _maintained(table.maintain)]
        wrong = [*unseen, *unread, *lake.quarantined, *_stale(done, rules), *rows]
        self._note("reconcile", wrong)
        unread_of = Counter(row.source for row in [*self._noted(), *lake.quarantined])
        directory = Path(self._fleet.results if self._results.is_local else ".")  # as for the report
        _write_metrics(directory / METRICS, done, unread_of)
        if to_publish and self._fleet.publish is not None:
            with Progress(self.spark, "publish") as progress:
                verdicts = current(self.spark, self._results.uri)
                published = publish(verdicts, done, self._fleet.publish, note=progress.note)
            self._show_line(f"published {published:,} verdicts")
        return wrong

    def _urls(self) -> dict[str, str]:
        return {one.name: one.url for one in self._fleet.database}

    def _note(self, step: str, rows: list[Quarantined], others: Collection[str] = ()) -> None:
        """Store what a step has not read, for the report; records of *others*, which it did not read, stay."""
        noted = self._results.read(_QUARANTINE) or {}
        known = [row for row in noted.get(step, ()) if row["source"] in others]
        self._results.write(_QUARANTINE, {**noted, step: [*known, *(asdict(row) for row in rows)]})

    def _noted(self) -> list[Quarantined]:
        noted = self._results.read(_QUARANTINE) or {}
        return [Quarantined(**row) for step in ("archive", "reconcile") for row in noted.get(step, ())]


def _maintained(maintain: Callable[[], list[Quarantined]]) -> list[Quarantined]:
    """Join small files; a refusal becomes a record, since the next run can join them."""
    try:
        return maintain()
    except LakeError as error:
        return [Quarantined(source="lake", item="small files", reason=str(error), count=None)]


def _watch(progress: Progress, done: Sequence[journals.Archived]) -> None:
    progress.note(f"{len(done):,} databases", sum(result.rows for result in done))


def _change(result: journals.Archived) -> str:
    """Return the line for a database whose error has begun, changed or ended."""
    if result.error is None:
        return f"{result.source}: it can be read again"
    return redact(f"not read: {result.source}: {without_name(result.source, result.error)}; it is tried again")


def _unread(done: Iterable[journals.Archived]) -> list[Quarantined]:
    return [
        Quarantined(source=result.source, item="journal", reason=without_name(result.source, result.error), count=None)
        for result in done
        if result.error is not None
    ]


def _stale(done: Run, rules: Rules) -> list[Quarantined]:
    """Return the journals that were archived longer ago than *skew*, if a transaction has ended since."""
    count = done.totals.get(Verdict.NOT_ARCHIVED, Total()).transactions
    old = [source for source in sorted(rules.asked) if rules.as_of - rules.archived.get(source, 0) > rules.skew]
    if not count or not old:
        return []
    reason = f"{count:,} transactions have ended since their journals were archived: dtx pipeline archive"
    return [Quarantined(source=source, item="journal", reason=reason, count=None) for source in old]


_READ: Final = {
    SourcePart.JOURNAL: ("archived", "When a journal was last read to its end; 0: never."),
    SourcePart.BRANCHES: ("asked", "When a database last reported its branches in doubt; 0: never."),
    SourcePart.DECISIONS: ("decisions", "When a decision log was last read; 0: never."),
}
"""The metric of each part of a source."""


def _write_metrics(path: Path, done: Run, unread: Mapping[str, int]) -> None:
    registry = CollectorRegistry()

    def gauge(name: str, text: str, label: str | None = None) -> Gauge:
        return Gauge(f"dtx_pipeline_{name}", text, [] if label is None else [label], registry=registry)

    gauge("reconciled_timestamp_seconds", "Time of the last reconciliation.").set(done.as_of / 1e6)
    gauge("lines", "Journal lines that the verdicts rest on.").set(done.lines)
    read = {part: gauge(f"{name}_timestamp_seconds", text, "source") for part, (name, text) in _READ.items()}
    for source, part, read_at, _ in done.sources:
        read[part].labels(source).set(0 if read_at is None else read_at.timestamp())
    verdicts = gauge("transactions", "Global transactions.", "verdict")
    for verdict in Verdict:
        verdicts.labels(str(verdict)).set(done.totals.get(verdict, Total()).transactions)
    missing = gauge("unread", "Records of data of a source that was not read.", "source")
    for source, count in unread.items():
        missing.labels(source).set(count)
    write_to_textfile(str(path), registry)
