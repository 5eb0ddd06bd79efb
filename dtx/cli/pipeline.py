"""``dtx pipeline``: archive, reconcile and report over the journals of a fleet, on Spark."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import duration, with_options
from dtx.config import parse_size, redact

if TYPE_CHECKING:
    from dtx.pipeline.quarantine import Quarantined
    from dtx.pipeline.session import SessionOptions

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MOST_SHOWN: Final = 50
"""Lines about what was not read; the report has them all."""

_FIRST: Final = """\b
The first time:
  pip install 'dtx[pipeline]'
  dtx pipeline example > pipeline.toml     then name your databases and logs in it
  dtx pipeline run                         archive, reconcile and report, one after the other

"""
_EPILOG: Final = """\b
Exit codes:
  0    done, and everything was read
  1    an error: it did not finish
  2    wrong usage, or a mistake in pipeline.toml
  3    finished, but something was not read: it is named on stderr and in the report
  130  stopped by Ctrl-C; the next run goes on where this one was
"""


class _Pipeline(click.Group):
    """Says what to install where a library is missing: they are imported when a command needs them."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("dtx"):
                raise
            raise CommandError(
                Exit.FAILED, f"the pipeline needs {error.name.partition('.')[0]}: pip install 'dtx[pipeline]'"
            ) from error


@click.group(cls=_Pipeline, epilog=_FIRST + _EPILOG)
def pipeline() -> None:
    """Did every distributed transaction end the same way everywhere? Which did not, what is stuck, and whose is it?

    'archive' copies the journals of all databases into a lake, a Delta table, each line once. 'reconcile' gives every
    global transaction a verdict, from the lake, from what every participant has in doubt and from the logs of the
    transaction managers; it reads only what has changed. 'report' makes one HTML page of that.

    Spark runs in this process unless --master or --remote say otherwise.
    """


def _size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    try:
        # Spark's own form, 2g, is 2GiB
        return None if value is None else parse_size(f"{value}iB" if value[-1:] in set("kmgKMG") else value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _settings(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise click.BadParameter(f"{text!r} is not spark.NAME=VALUE")
        found[name] = value
    return found


def _with_spark(function: _Function) -> _Function:
    """Give a command the options of a session; it is called with ``spark: SessionOptions``."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        names = (
            "master", "remote", "memory", "executor_memory", "partitions", "local_dir", "keep_classes", "ui", "log",
            "settings",
        )  # fmt: skip
        given = {name: kwargs.pop(f"spark_{name}") for name in names}
        if given["master"] and given["remote"]:
            raise click.UsageError("--master and --remote exclude each other")
        from dtx.pipeline.session import SessionOptions

        chosen = {name: value for name, value in given.items() if value is not None}
        with _sentences():
            return function(*args, spark=SessionOptions(**chosen), **kwargs)

    command: _Function = with_options(
        click.option(
            "--master", "spark_master", metavar="URL", help="local[*] (default), local[2], spark://host:7077, ..."
        ),
        click.option("--remote", "spark_remote", metavar="URL", help="A Spark Connect server: sc://host:15002."),
        click.option(
            "--memory",
            "spark_memory",
            metavar="SIZE",
            callback=_size,
            help="Java heap of this process; default: a quarter of the machine, 1 to 5 GiB. The rest is spilled.",
        ),
        click.option(
            "--executor-memory",
            "spark_executor_memory",
            metavar="SIZE",
            callback=_size,
            help="Of each executor of a cluster.",
        ),
        click.option(
            "--partitions",
            "spark_partitions",
            type=click.IntRange(min=1),
            metavar="NUMBER",
            help="Pieces of a shuffle; default by the size of the lake. More of them need less memory at a time.",
        ),
        click.option(
            "--local-dir",
            "spark_local_dir",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="For what is spilled; default: the directory for temporary files.",
        ),
        click.option(
            "--keep-classes",
            "spark_keep_classes",
            is_flag=True,
            default=None,
            help="Keep Java's classes in a file (185 MB), if there is none: later runs start Spark in half the time.",
        ),
        click.option("--ui", "spark_ui", is_flag=True, default=None, help="Serve Spark's own web pages."),
        click.option(
            "--spark-log",
            "spark_log",
            type=click.Choice(("error", "warn", "info", "debug")),
            help="From which level on Spark's log is shown; default error.",
        ),
        click.option(
            "--set",
            "spark_settings",
            multiple=True,
            metavar="NAME=VALUE",
            callback=_settings,
            help="A setting of Spark's.",
        ),
    )(run)
    return command


_fleet = click.option(
    "--fleet",
    "fleet_file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("pipeline.toml"),
    show_default=True,
    metavar="FILE",
    help="What there is; 'dtx pipeline example' prints one.",
)


@contextmanager
def _sentences() -> Iterator[None]:
    """Errors of the pipeline and of Spark, as one sentence; what Spark has to say beside it, DTX_DEBUG=1 shows."""
    try:
        yield
    except (click.ClickException, CommandError):
        raise
    except Exception as error:
        kind = type(error)
        if kind.__module__.startswith(("pyspark", "py4j", "grpc")):
            raise CommandError(Exit.FAILED, f"spark: {_spark_sentence(error)}") from error
        if kind.__module__.startswith("dtx.pipeline"):
            raise CommandError(Exit.FAILED, str(error)) from error
        raise


def _spark_sentence(error: Exception) -> str:
    from dtx.pipeline.session import explain

    return redact(explain(error))


def _finish(rows: Iterable["Quarantined"]) -> int:
    """Say what was not read; the exit code."""
    from dtx.pipeline.quarantine import exit_code

    found = list(rows)
    for row in found[:_MOST_SHOWN]:
        click.echo(redact(f"not read: {row}"), err=True)
    if len(found) > _MOST_SHOWN:
        click.echo(f"not read: {len(found) - _MOST_SHOWN:,} more, see the report", err=True)
    return int(exit_code(found))


@pipeline.command("example")
def example() -> None:
    """Print a pipeline.toml to begin with."""
    from dtx.pipeline.fleet import EXAMPLE

    click.echo(EXAMPLE, nl=False)


@pipeline.command("archive", epilog=_EPILOG)
@click.argument("names", nargs=-1, metavar="[DATABASE]...")
@_fleet
@click.option("--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option(
    "--again", is_flag=True, help="Read these journals from their beginning, and leave out what the lake has."
)
@click.option(
    "--interval",
    default="10s",
    show_default=True,
    callback=duration,
    metavar="DURATION",
    help="With --follow: between two looks.",
)
def archive(names: tuple[str, ...], fleet_file: Path, follow: bool, again: bool, interval: float) -> int:
    """Copy what the journals have new into the lake, a Delta table, each line exactly once. Needs no Spark.

    A run that was killed, at whatever moment, is made good by the next one. A database that cannot be read does not
    stop the others: it is named at the end, with exit code 3, and read from where it was the next time. Small files are
    joined, and files that the table has not named for a week are removed.
    """
    from dtx.pipeline import steps
    from dtx.pipeline.fleet import load
    from dtx.pipeline.session import SessionOptions

    if again and (follow or not names):
        raise click.UsageError("--again needs the names of databases, and does not go with --follow")
    fleet = load(fleet_file)
    with _sentences(), steps.Steps(fleet, SessionOptions()) as run:
        return _finish(run.follow(names, interval) if follow else run.archive(names, again=again))


@pipeline.command("migrate-lake", epilog=_EPILOG)
@_fleet
def migrate_lake(fleet_file: Path) -> int:
    """Make a Delta table of a lake of Parquet files that an older dtx has written.

    All lines go into one commit; the old files are removed afterwards. The next 'archive' reads the journals once more
    and leaves out what the lake has. A run that was killed is repeated.
    """
    from dtx.pipeline.fleet import load
    from dtx.pipeline.migration import migrate
    from dtx.pipeline.progress import Progress

    lake = load(fleet_file).lake
    with _sentences(), Progress(None, "migrate-lake") as progress:
        rows = migrate(lake, lambda rows: progress.note("copying", rows))
    click.echo(f"{lake} is a Delta table of {rows:,} lines now: dtx pipeline archive goes on with it")
    return Exit.OK


@pipeline.command("retain", epilog=_EPILOG)
@_fleet
@click.option(
    "--keep", required=True, callback=duration, metavar="DURATION", help="For example 400d: older days are removed."
)
@click.option("--yes", is_flag=True, help="Do it; without, say what would be removed.")
def retain(fleet_file: Path, keep: float, yes: bool) -> int:
    """Remove what is older: lines of the lake, verdicts of settled transactions, their history, totals of runs.

    What is still open stays, however old it is. The files of the tables stay for those who read an older version, a
    week unless the table says otherwise (delta.deletedFileRetentionDuration); then 'archive' and 'reconcile' remove
    them. Keep more than the journals do, or 'archive --follow' and clocks that are wrong bring lines once more.
    """
    from dtx.pipeline import steps
    from dtx.pipeline.fleet import load
    from dtx.pipeline.session import SessionOptions

    try:
        before = (datetime.now(UTC) - timedelta(seconds=keep)).date()
    except OverflowError:
        raise click.UsageError("--keep reaches back to before the first day there is") from None
    with _sentences(), steps.Steps(load(fleet_file), SessionOptions()) as run:
        found = run.retain(before, dry_run=not yes)
    what = ", ".join(f"{count:,} {name}" for name, count in found.items())
    click.echo(f"removed {what}, of before {before}" if yes else f"would remove {what}, of before {before}: --yes")
    return Exit.OK


@pipeline.command("reconcile", epilog=_EPILOG)
@_fleet
@click.option("--full", is_flag=True, help="Read the whole lake again, instead of what has changed.")
@click.option("--no-publish", is_flag=True, help="Do not write to the database that 'publish' names.")
@_with_spark
def reconcile(fleet_file: Path, full: bool, no_publish: bool, spark: "SessionOptions") -> int:
    """Give every global transaction a verdict."""
    from dtx.pipeline import steps
    from dtx.pipeline.fleet import load

    with steps.Steps(load(fleet_file), spark) as run:
        return _finish(run.reconcile(full=full, to_publish=not no_publish))


@pipeline.command("report", epilog=_EPILOG)
@_fleet
@click.option(
    "--to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Default: 'report' in the results."
)
@_with_spark
def report(fleet_file: Path, to: Path | None, spark: "SessionOptions") -> int:
    """Make a page and CSVs of the verdicts. The page needs no network and no other file."""
    from dtx.pipeline import steps
    from dtx.pipeline.fleet import load

    with steps.Steps(load(fleet_file), spark) as run:
        return _finish(run.report(to))


@pipeline.command("run", epilog=_EPILOG)
@_fleet
@click.option("--to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Of the report.")
@click.option("--no-publish", is_flag=True, help="Do not write to the database that 'publish' names.")
@_with_spark
def run_all(fleet_file: Path, to: Path | None, no_publish: bool, spark: "SessionOptions") -> int:
    """Archive, reconcile and report, one after the other: what a timer starts every night."""
    from dtx.pipeline import steps
    from dtx.pipeline.fleet import load

    failed = None
    with steps.Steps(load(fleet_file), spark) as run:
        run.archive(())
        try:
            run.reconcile(full=False, to_publish=not no_publish)
        except steps.PublishingFailed as error:
            failed = error  # the verdicts are there, and the report is of them
        code = _finish(run.report(to))
    if failed is not None:
        raise failed
    return code


@pipeline.command("generate", epilog=_EPILOG)
@click.argument("directory")
@click.option("--transactions", type=click.IntRange(min=1), default=100_000, show_default=True, metavar="NUMBER")
@click.option(
    "--anomalies", type=click.IntRange(min=0), default=10, show_default=True, metavar="NUMBER", help="Of each kind."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="NUMBER", help="Another one gives another fleet."
)
@_with_spark
def generate(directory: str, transactions: int, anomalies: int, seed: int, spark: "SessionOptions") -> int:
    """Write the journals of a fleet that never was, with anomalies that are known: DIRECTORY/truth has them."""
    from dtx.pipeline import generate as fleets
    from dtx.pipeline.progress import Progress
    from dtx.pipeline.session import open_session

    try:
        plan = fleets.FleetPlan(transactions=transactions, anomalies=anomalies, seed=seed)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with open_session(spark) as session, Progress(session, "generate"):
        fleets.write(fleets.generate(session, plan), directory)
    click.echo(f"{transactions:,} transactions in {directory}: events, observations, decisions, truth", file=sys.stdout)
    return Exit.OK
