"""Options of the source: a wrong one is refused with a sentence before any read."""

import json

import pytest

from dtx.pipeline.quarantine import sample
from dtx.pipeline.source import SourceError
from dtx.pipeline.source.datasource import Place
from dtx.pipeline.source.options import parse
from dtx.pipeline.source.server import SourceIdentity, passes, sentence
from dtx.pipeline.source.snapshot import SourceSnapshot

URL = "postgresql://u:secret@127.0.0.1/d"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "set one of the options: url"),
        ({"url": URL, "sources": "{}"}, "set one of the options: url"),
        ({"url": "mysql://x"}, "does not start with postgresql://"),
        ({"sources": "[]"}, "not a JSON object"),
        ({"sources": '{"a": 3}'}, "does not start with postgresql://"),
        ({"url": URL, "table": "message"}, "table 'message' cannot be read"),
        ({"url": URL, "tabel": "branch"}, "unknown option 'tabel'"),
        ({"url": URL, "partitions": "0"}, "not a whole number from 1"),
        ({"url": URL, "stallTimeout": "1.5"}, "not a whole number from 1"),
        ({"url": URL, "unavailable": "never"}, "not one of fail, wait"),
    ],
)
def test_an_option_that_is_wrong_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse(given)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def test_names_of_options_are_read_in_any_case() -> None:
    assert parse({"URL": URL, "ROWSPERPARTITION": "7"}).rows == 7


PLACE = Place(
    identity=SourceIdentity(system="1/2", timeline=3),
    snapshot=SourceSnapshot(20, frozenset({12})),
    swept=SourceSnapshot(9),
    since="2026-01-01",
)


def test_a_place_survives_its_checkpoint() -> None:
    assert Place.read("a", json.loads(json.dumps(PLACE.written()))) == PLACE


@pytest.mark.parametrize("since", ["'; DROP", "", "x"])
def test_a_checkpoint_of_another_cluster_is_refused(since: str) -> None:
    with pytest.raises(SourceError, match="holds no place"):
        Place.read("a", PLACE.written() | {"since": since})
    with pytest.raises(SourceError, match="holds no place"):
        Place.read("a", 7)


def test_another_history_is_refused() -> None:
    """Transaction ids differ there, so rows would be lost or read twice."""
    now = SourceSnapshot(30)
    with pytest.raises(SourceError, match="not the database that was read before"):
        PLACE.follow("a", SourceIdentity(system="9/2", timeline=3), now, any_timeline=True)
    with pytest.raises(SourceError, match="timeline from 3 to 4"):
        PLACE.follow("a", SourceIdentity(system="1/2", timeline=4), now, any_timeline=False)
    with pytest.raises(SourceError, match="in an older state than when it was last read"):
        PLACE.follow("a", PLACE.identity, SourceSnapshot(19), any_timeline=False)
    assert (
        PLACE.follow("a", SourceIdentity(system="1/2", timeline=4), now, any_timeline=True).snapshot == PLACE.snapshot
    )


def test_errors_hide_passwords_and_transient_states_are_known() -> None:
    assert sentence(OSError(f"no route to {URL}\nmore.")) == "no route to postgresql://u:***@127.0.0.1/d"
    assert passes(None)
    assert passes("57P03")
    assert not passes("42501")


def test_samples_are_short_and_printable() -> None:
    assert sample("a\x1b[2Jb") == "a\\x1b[2Jb"
    assert len(sample("x" * 10_000)) == 200
