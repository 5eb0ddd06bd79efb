"""Snapshots as sets of transactions. Their SQL is tested on PostgreSQL."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtx.pipeline.source.snapshot import NOTHING, SourceSnapshot

XIDS = range(1, 40)


def shows(snapshot: SourceSnapshot, xid: int) -> bool:
    """Whether the transaction had ended at the snapshot."""
    return xid < snapshot.xmax and xid not in snapshot.under_way


@st.composite
def snapshots(draw: st.DrawFn) -> SourceSnapshot:
    xmax = draw(st.integers(min_value=1, max_value=38))
    return SourceSnapshot(xmax, frozenset(draw(st.sets(st.integers(min_value=1, max_value=max(1, xmax - 1))))) - {xmax})


@st.composite
def two_moments(draw: st.DrawFn) -> tuple[SourceSnapshot, SourceSnapshot]:
    """An earlier and a later snapshot of one database. A transaction that has ended stays so."""
    early = draw(snapshots())
    xmax = draw(st.integers(min_value=early.xmax, max_value=39))
    still = draw(st.sets(st.sampled_from(sorted(early.under_way)))) if early.under_way else set()
    begun = draw(st.sets(st.integers(min_value=early.xmax, max_value=xmax - 1))) if xmax > early.xmax else set()
    return early, SourceSnapshot(xmax, frozenset(still | begun))


@given(snapshots())
def test_a_written_snapshot_reads_the_same(snapshot: SourceSnapshot) -> None:
    assert SourceSnapshot.parse(str(snapshot)) == snapshot


@given(snapshots(), snapshots())
def test_a_snapshot_contains_another_that_shows_less(one: SourceSnapshot, other: SourceSnapshot) -> None:
    expected = all(shows(one, xid) for xid in XIDS if shows(other, xid))
    assert one.contains(other) is expected


@given(two_moments(), st.integers(min_value=1, max_value=40))
def test_a_cut_between_two_snapshots_omits_only_new_transactions(
    moments: tuple[SourceSnapshot, SourceSnapshot], at: int
) -> None:
    """Otherwise a stream with a limit would lose transactions or read some twice."""
    start, end = moments
    cut = end.cut(start, at)
    for xid in XIDS:
        assert shows(cut, xid) is (shows(start, xid) or (shows(end, xid) and xid < at))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1:2",
        "1:2:3:4",
        "a:2:",
        "5:3:",
        "1:0:",
        "1:5:5",
        "1:5:9",
        "3:5:2",
        "1:5:-1",
        "1:5:2,,3",
        "1:5:'",
        f"1:{1 << 64}:",
    ],
)
def test_an_invalid_snapshot_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a snapshot of PostgreSQL"):
        SourceSnapshot.parse(text)


def test_nothing_shows_nothing() -> None:
    assert not any(shows(NOTHING, xid) for xid in XIDS)
