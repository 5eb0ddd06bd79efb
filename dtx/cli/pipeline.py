"""``dtx pipeline``: archive, reconcile and report over the journals of a fleet, on Spark."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import Subcommands, duration, with_options
from dtx.config import parse_size, redact

if TYPE_CHECKING:
    from dtx.pipeline.quarantine import Quarantined
    from dtx.pipeline.session import SessionOptions

_Function = TypeVar("_Function", bound=Callable[..., Any])
NOT_READ: Final = 3
"""Exit code of a run that finished, but did not read everything."""
_MOST_SHOWN: Final = 50
"""Lines on stderr about sources that were not read; the report has all of them."""

_FIRST: Final = """\b
The first time:
  pip install 'dtx[pipeline]'
  dtx pipeline example > pipeline.toml     then write your databases and logs into it
  dtx pipeline run                         archive, reconcile and report, one after the other

"""
_EPILOG: Final = """\b
Exit codes:
  0    done, and everything was read
  1    an error: the command did not finish
  2    wrong usage, or a mistake in pipeline.toml
  3    finished, but some sources were not read: stderr and the report name them
  130  stopped by Ctrl-C; the next run continues from there
"""


class _Pipeline(Subcommands):
    """Names the package to install if a library is missing; libraries are imported when a command needs them."""

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
    """Find distributed transactions that did not end the same way everywhere, and transactions that are stuck.

    'archive' copies the journals of all databases into a lake, a Delta table, each line once. 'reconcile' gives every
    global transaction a verdict. It uses the lake, the branches in doubt of every participant and the logs of the
    transaction managers, and reads only changes. 'report' writes the verdicts to one HTML page.

    Spark runs in this process unless --master or --remote is given.
    """


def _size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    try:
        # Spark's form 2g means 2GiB.
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
    """Give a command the options of a Spark session; it is called with ``spark: SessionOptions``."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        names = (
            "master", "remote", "memory", "executor_memory", "partitions", "local_dir", "ui", "log", "settings",
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
            help="Java heap of this process; default: a quarter of the machine, 1 to 5 GiB. The rest goes to disk.",
        ),
        click.option(
            "--executor-memory",
            "spark_executor_memory",
            metavar="SIZE",
            callback=_size,
            help="Memory of each executor of a cluster.",
        ),
        click.option(
            "--partitions",
            "spark_partitions",
            type=click.IntRange(min=1),
            metavar="NUMBER",
            help="Partitions of a shuffle; default by the size of the lake. More of them need less memory at a time.",
        ),
        click.option(
            "--local-dir",
            "spark_local_dir",
            type=click.Path(path_type=Path, file_okay=False),
            metavar="DIR",
            help="For data that does not fit into memory; default: the directory for temporary files.",
        ),
        click.option("--ui", "spark_ui", is_flag=True, default=None, help="Serve Spark's web pages."),
        click.option(
            "--spark-log",
            "spark_log",
            type=click.Choice(("error", "warn", "info", "debug")),
            help="Lowest level of Spark's log that is shown; default error.",
        ),
        click.option(
            "--set",
            "spark_settings",
            multiple=True,
            metavar="NAME=VALUE",
            callback=_settings,
            help="A setting of Spark; can be repeated.",
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
    help="The databases and logs; 'dtx pipeline example' prints a file to start with.",
)


@contextmanager
def _sentences() -> Iterator[None]:
    """Turn errors of the pipeline and of Spark into one sentence; DTX_DEBUG=1 shows the rest of Spark's error."""
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
    """Print the sources that were not read, and return the exit code."""
    found = list(rows)
    for row in found[:_MOST_SHOWN]:
        click.echo(redact(f"not read: {row}"), err=True)
    if len(found) > _MOST_SHOWN:
        click.echo(f"not read: {len(found) - _MOST_SHOWN:,} more, see the report", err=True)
    return NOT_READ if found else Exit.OK


@pipeline.command("example")
def example() -> None:
    """Print an example of pipeline.toml."""
    from dtx.pipeline.fleet import EXAMPLE

    click.echo(EXAMPLE.read_text(encoding="utf-8"), nl=False)


@pipeline.command("archive", epilog=_EPILOG)
@click.argument("names", nargs=-1, metavar="[DATABASE]...")
@_fleet
@click.option("--follow", is_flag=True, help="Continue with new lines until Ctrl-C.")
@click.option("--again", is_flag=True, help="Read these journals from the beginning, and skip lines that the lake has.")
@click.option(
    "--interval",
    default="10s",
    show_default=True,
    callback=duration,
    metavar="DURATION",
    help="With --follow: time between two reads.",
)
def archive(names: tuple[str, ...], fleet_file: Path, follow: bool, again: bool, interval: float) -> int:
    """Copy new lines of the journals into the lake.

    The lake is a Delta table, and gets each line exactly once. Spark is not needed. After a kill, at any moment,
    the next run completes the work. A database that cannot be read does not stop the others. The command
    names it at the end, with exit code 3, and the next run continues with it. Small files are joined. Files that have
    not been part of the table for a week are removed.
    """
    from dtx.pipeline import steps
    from dtx.pipeline.fleet import load
    from dtx.pipeline.session import SessionOptions

    if again and (follow or not names):
        raise click.UsageError("--again needs the names of databases, and excludes --follow")
    fleet = load(fleet_file)
    with _sentences(), steps.Steps(fleet, SessionOptions()) as run:
        return _finish(run.follow(names, interval) if follow else run.archive(names, again=again))


@pipeline.command("migrate-lake", epilog=_EPILOG)
@_fleet
def migrate_lake(fleet_file: Path) -> int:
    """Convert a lake of Parquet files to Delta.

    An older dtx has written such a lake. All lines go into one commit; then the old files are removed. The next
    'archive' reads the journals again and skips lines that the lake has. After a kill, run the command again.
    """
    from dtx.pipeline.fleet import load
    from dtx.pipeline.migration import migrate
    from dtx.pipeline.progress import Progress

    lake = load(fleet_file).lake
    with _sentences(), Progress(None, "migrate-lake") as progress:
        rows = migrate(lake, lambda rows: progress.note("copying", rows))
    click.echo(f"{lake} is a Delta table of {rows:,} lines now: 'dtx pipeline archive' continues with it")
    return Exit.OK


@pipeline.command("retain", epilog=_EPILOG)
@_fleet
@click.option(
    "--keep", required=True, callback=duration, metavar="DURATION", help="For example 400d: older days are removed."
)
@click.option("--yes", is_flag=True, help="Remove; without it, only show what would be removed.")
def retain(fleet_file: Path, keep: float, yes: bool) -> int:
    """Remove old lines, verdicts and history.

    These are lines of the lake, verdicts of settled transactions, their history, and totals of runs. Open
    transactions stay, whatever their age. The files stay for readers of older versions of the table, for a week or
    for delta.deletedFileRetentionDuration; then 'archive' and 'reconcile' remove them. Keep lines longer than the
    journals do: otherwise 'archive --follow' and wrong clocks can add lines again.
    """
    from dtx.pipeline import steps
    from dtx.pipeline.fleet import load
    from dtx.pipeline.session import SessionOptions

    try:
        before = (datetime.now(UTC) - timedelta(seconds=keep)).date()
    except OverflowError:
        raise click.UsageError("--keep reaches back too far: there is no such date") from None
    with _sentences(), steps.Steps(load(fleet_file), SessionOptions()) as run:
        found = run.retain(before, dry_run=not yes)
    what = ", ".join(f"{count:,} {name}" for name, count in found.items())
    click.echo(
        f"removed {what}, from before {before}" if yes else f"would remove {what}, from before {before}; use --yes"
    )
    return Exit.OK


@pipeline.command("reconcile", epilog=_EPILOG)
@_fleet
@click.option("--full", is_flag=True, help="Read the whole lake again, instead of only changes.")
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
    """Write the verdicts to an HTML page and CSV files. The page needs no network and no other file."""
    from dtx.pipeline import steps
    from dtx.pipeline.fleet import load

    with steps.Steps(load(fleet_file), spark) as run:
        return _finish(run.report(to))


@pipeline.command("run", epilog=_EPILOG)
@_fleet
@click.option("--to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Directory of the report.")
@click.option("--no-publish", is_flag=True, help="Do not write to the database that 'publish' names.")
@click.option(
    "--keep-classes/--no-keep-classes",
    default=True,
    help="Whether the first run keeps Java's classes in a file (185 MB), so that Spark starts in half the time.",
)
@_with_spark
def run_all(fleet_file: Path, to: Path | None, no_publish: bool, keep_classes: bool, spark: "SessionOptions") -> int:
    """Archive, reconcile and report. A timer can start it every night."""
    from dtx.pipeline import steps
    from dtx.pipeline.fleet import load

    failed = None
    with steps.Steps(load(fleet_file), replace(spark, keep_classes=keep_classes)) as run:
        run.archive(())
        try:
            run.reconcile(full=False, to_publish=not no_publish)
        except steps.PublishingFailed as error:
            failed = error  # the verdicts are stored, so the report can be written
        code = _finish(run.report(to))
    if failed is not None:
        raise failed
    return code
