"""Messages, notes and locks of the steps. The steps with Spark are tested in tests/servers/pipeline."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dtx.pipeline import steps as module
from dtx.pipeline.archive import Archived
from dtx.pipeline.files import Files, LakeError
from dtx.pipeline.fleet import Fleet, load
from dtx.pipeline.lake import Lake
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.reconcile import Run, Total
from dtx.pipeline.session import SessionOptions
from dtx.pipeline.steps import Steps
from dtx.pipeline.verdicts import Rules


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    databases = "".join(f'[[database]]\nname = "{name}"\nurl = "postgresql://h/{name}"\n' for name in ("a", "b"))
    (tmp_path / "pipeline.toml").write_text(f'lake = "lake"\nresults = "results"\n{databases}')
    return load(tmp_path / "pipeline.toml")


def steps(fleet: Fleet, said: list[str]) -> Steps:
    """Steps without Spark."""
    made = Steps(fleet, SessionOptions(), show=said.append)
    made.__dict__["spark"] = None
    return made


def failed(source: str, error: str | None) -> Archived:
    return Archived(source, error=error and f"{source}: {error}")


def test_a_following_archive_reports_a_failing_database_immediately(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once for each change, without passwords."""

    def follow(*_: object, watch: Callable[[Sequence[Archived]], None], **__: object) -> list[Archived]:
        for error in (None, "gone", "gone", "gone postgresql://u:pw@h/d", None, None):
            watch([failed("a", None), failed("b", error)])
        return []

    monkeypatch.setattr("dtx.pipeline.archive.follow", follow)
    said: list[str] = []
    steps(fleet, said).follow((), 1.0)
    assert capsys.readouterr().err.splitlines() == [
        "not read: b: gone; it is tried again",
        "not read: b: gone postgresql://u:***@h/d; it is tried again",
        "b: it can be read again",
    ]


def test_an_unread_source_stays_noted_until_it_is_read(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run over some databases does not change the notes of the others."""
    results: list[Archived] = []
    monkeypatch.setattr("dtx.pipeline.archive.archive", lambda *_, **__: results)
    monkeypatch.setattr("dtx.pipeline.archive.maintain", lambda *_: [])
    said: list[str] = []
    run = steps(fleet, said)

    def noted(*done: Archived, names: tuple[str, ...] = ()) -> list[str]:
        results[:] = done
        run.archive(names)
        return [row.source for row in run._noted()]

    assert noted(failed("a", None), failed("b", "gone")) == ["b"]
    assert said == ["archived 0 new lines of 1 of 2 databases"]
    assert noted(failed("a", "gone"), names=("a",)) == ["b", "a"]
    assert noted(failed("a", None), names=("a",)) == ["b"]
    assert noted(failed("a", None), failed("b", None)) == []
    assert said[-1] == "archived 0 new lines of 2 databases"
    noted(Archived("a", rows=3, again=40), failed("b", None))
    assert said[-1] == ("archived 3 new lines of 2 databases; 40 known lines were read again")


def test_two_do_not_reconcile_into_the_same_results(fleet: Fleet) -> None:
    with (
        Files(fleet.results).alone(module._LOCK),
        pytest.raises(LakeError, match="another process uses"),
    ):
        steps(fleet, []).reconcile(full=False, to_publish=False)


def test_verdicts_that_cannot_be_published_are_reported_and_noted(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    Lake(fleet.lake).table.create()
    done = Run(
        number=1, as_of=1, token=0, lines_read=2, lines=3, touched=0, totals={}, fingerprint=0
    )  # fmt: skip
    given: dict[str, Any] = {}

    def run(*_: object, **words: Any) -> Run:
        given.update(words)
        return done

    def publish(*_: object, **__: object) -> int:
        raise module.PublishingFailed("the database is away")

    away = [
        Quarantined(source="a", item="journal", reason="newer", count=7, whole=True),
        Quarantined(source="b", item="pg_prepared_xacts", reason="no xids", count=2),
    ]
    monkeypatch.setattr(module, "observe", lambda *_: (None, away))
    monkeypatch.setattr(module, "read_decisions", lambda *_: (None, []))
    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "publish", publish)
    monkeypatch.setattr(module, "current", lambda *_: None)
    said: list[str] = []
    wanted = steps(fleet.model_copy(update={"publish": "postgresql://h/d"}), said)
    with pytest.raises(module.PublishingFailed):
        wanted.reconcile(full=False, to_publish=True)
    assert said == ["reconciled 0 transactions from 3 lines, 2 of them new"]
    assert wanted._noted() == away
    assert given["away"] == {"a"}, "b was read completely"


def test_a_lake_older_than_ended_transactions_is_named(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fresh lake it is not: transactions end while a run is in progress."""
    ended = {"not-archived": Total(transactions=2, branches=2)}

    def run(*words: Any, **more: Any) -> Run:
        rules: Rules = words[5]
        assert rules.asked == {"b"}, "a is unavailable"
        assert (more["participants"], more["away"]) == (["a", "b"], {"a"})
        return Run(
            number=1, as_of=rules.as_of, token=0, lines_read=2, lines=3, touched=0, totals=ended,
            fingerprint=0, archived=rules.archived, asked={"a": 2_000_000, "b": rules.as_of}, logs_read={"tm": 0},
        )  # fmt: skip

    away = Quarantined(source="a", item="branch", reason="away", count=None)
    monkeypatch.setattr(module, "observe", lambda *_: (None, [away]))
    monkeypatch.setattr(module, "read_decisions", lambda *_: (None, []))
    monkeypatch.setattr(module, "run", run)
    lake = Lake(fleet.lake)
    lake.table.create()
    lake.note("b", batch=None, place={}, read_at=1_500_000)
    (stale,) = steps(fleet, []).reconcile(full=False, to_publish=False)[1:]
    assert (stale.source, stale.item) == ("b", "journal")
    assert stale.reason == "2 transactions have ended since their journals were archived: dtx pipeline archive"
    metrics = (Path(fleet.results) / module.METRICS).read_text().splitlines()
    assert 'dtx_pipeline_archived_timestamp_seconds{source="b"} 1.5' in metrics
    assert 'dtx_pipeline_archived_timestamp_seconds{source="a"} 0.0' in metrics
    assert 'dtx_pipeline_asked_timestamp_seconds{source="a"} 2.0' in metrics
    assert 'dtx_pipeline_decisions_timestamp_seconds{source="tm"} 0.0' in metrics
    assert 'dtx_pipeline_transactions{verdict="not-archived"} 2.0' in metrics
    assert 'dtx_pipeline_unread{source="a"} 1.0' in metrics
    lake.note("b", batch=None, place={}, read_at=time.time_ns() // 1000)
    assert steps(fleet, []).reconcile(full=False, to_publish=False) == [away]
    ended.clear()
    lake.note("b", batch=None, place={}, read_at=1_500_000)
    assert steps(fleet, []).reconcile(full=False, to_publish=False) == [away], "no known transaction has ended"
