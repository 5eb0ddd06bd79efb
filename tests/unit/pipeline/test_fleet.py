"""pipeline.toml: its settings, and the messages for mistakes in it."""

from datetime import timedelta
from pathlib import Path

import pytest

from dtx.config import ConfigError
from dtx.pipeline.fleet import EXAMPLE, load

_SECRETS = {"BANK_A_PASSWORD": "one", "LEDGER_PASSWORD": "two", "PASSWORD": "three"}
_LEAST = 'lake = "lake"\nresults = "s3://bucket/results"\n'


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "pipeline.toml").write_text(text)
    return tmp_path / "pipeline.toml"


def test_the_example_is_a_fleet(tmp_path: Path) -> None:
    fleet = load(written(tmp_path, EXAMPLE.read_text()), _SECRETS)
    assert fleet.sources() == {"bank-a": {"name": "bank-a", "url": "postgresql://reader:one@bank-a/dtx"}}
    assert [(log.name, log.format) for log in fleet.decisions] == [("orders", "dtx"), ("batch", "atomikos")]
    assert fleet.orphan_after == timedelta(hours=1)
    assert fleet.lake == str(tmp_path / "lake")


def test_relative_paths_begin_where_the_file_is_and_addresses_stay(tmp_path: Path) -> None:
    fleet = load(written(tmp_path, _LEAST + '[[decisions]]\nname = "a"\nformat = "csv"\npath = "log.csv"\n'))
    assert (fleet.results, fleet.decisions[0].path) == ("s3://bucket/results", str(tmp_path / "log.csv"))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ('form = "delta"', "form: Extra inputs are not permitted"),
        ("lakes = 1", "lakes: Extra inputs are not permitted"),
        ('[[database]]\nname = "a"\nurl = "mysql://h/d"', "database.0.url: does not start with postgresql://"),
        ('[[participant]]\nname = "a"\nurl = "file:x"', "does not start with postgresql:// or mysql://"),
        ('[[decisions]]\nname = "a"\nformat = "dtx"', "decisions 'a' need a path or a url, one of the two"),
        ('[[decisions]]\nname = "a"\nformat = "csv"\nurl = "postgresql://h/d"', 'a url is for format "dtx"'),
        ('[[decisions]]\nname = "a"\nformat = "xml"\npath = "x"', "decisions.0.format: Input should be"),
        ('publish = "mysql://h/d"', "publish: does not start with postgresql://"),
        ('skew = "9e9d"', "skew: '9e9d' is not a duration"),
        ('skew = "99999999999d"', "skew: 99999999999d is longer than a hundred years"),
        (f'[[database]]\nname = "{"北" * 24}"\nurl = "postgresql://h/d"', "is too long for the name of a file"),
        ('orphan_after = "soon"', "orphan_after: 'soon' is not a duration"),
        (
            '[[database]]\nname = "a"\nurl = "postgresql://h/d"\n[[participant]]\nname = "a"\nurl = "mysql://h"',
            "'a' is the name of two databases and participants",
        ),
        ('publish = "postgresql://${NOBODY}@h/d"', "the environment variable NOBODY is not set"),
        ("lake = ", "is not TOML"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(tmp_path: Path, more: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(written(tmp_path, f"{_LEAST}{more}\n"), {})
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("lake", "results"), [("a", "a/b"), ("a/b", "a"), ("a", "x/../a")])
def test_lake_and_results_are_not_one_inside_the_other(tmp_path: Path, lake: str, results: str) -> None:
    """Files that a table does not name are removed after a week."""
    with pytest.raises(ConfigError, match="lake and results are one inside the other"):
        load(written(tmp_path, f'lake = "{lake}"\nresults = "{results}"\n'), {})


def test_a_password_is_in_no_message(tmp_path: Path) -> None:
    text = _LEAST + '[[database]]\nname = "a"\nurl = "mysql://u:${PASSWORD}@h/d"\n'
    with pytest.raises(ConfigError) as refused:
        load(written(tmp_path, text), {"PASSWORD": "hunter2"})
    assert "hunter2" not in str(refused.value)


def test_a_file_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtx pipeline example > .*pipeline.toml writes one"):
        load(tmp_path / "pipeline.toml")


def test_databases_are_chosen_by_name(tmp_path: Path) -> None:
    fleet = load(written(tmp_path, _LEAST + '[[database]]\nname = "a"\nurl = "postgresql://h/d"\n'))
    assert list(fleet.sources(("a",))) == ["a"]
    with pytest.raises(ConfigError, match="there is no database 'b': there are a"):
        fleet.sources(("b",))
    with pytest.raises(ConfigError, match="there are no databases: add a"):
        load(written(tmp_path, _LEAST)).sources()
