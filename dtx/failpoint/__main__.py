"""``python -m dtx.failpoint``: the command ``dtx``, in a process that dies, stops or waits at a failpoint."""

import runpy
import sys
from pathlib import Path

import click

from dtx import failpoint
from dtx.failpoint.action import Action, FailpointTarget, point_handler
from dtx.failpoint.points import Point


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.option("--list", "list_", is_flag=True, help="Print all points and exit.")
@click.option("--at", metavar="NAME[#N]", help="Name or number of the point; N is the occurrence, 1 by default.")
@click.option("--do", "action", type=click.Choice([action.value for action in Action]), help="Action at the point.")
@click.option("--hold-file", type=click.Path(path_type=Path), help="For hold: dtx makes it, and waits for its removal.")
@click.option("--trace", type=click.Path(path_type=Path), help="Append the name of each point that is reached.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def main(
    *,
    list_: bool,
    at: str | None,
    action: str | None,
    hold_file: Path | None,
    trace: Path | None,
    words: tuple[str, ...],
) -> None:
    r"""Run `dtx WORDS` with a failpoint armed; for tests.

    \b
    Examples:
      python -m dtx.failpoint --at log-prepared-after --do die -- serve --listen 127.0.0.1:0
      python -m dtx.failpoint --at unit-sent#2 --do hold --hold-file /tmp/held -- serve
      python -m dtx.failpoint --trace /tmp/points -- serve
    """
    if list_:
        click.echo("".join(f"{point.number:4} {point.label:32} {point.sentence}\n" for point in Point), nl=False)
        return
    if not words:
        raise click.UsageError("a command of dtx is missing, e.g. -- serve")
    target: FailpointTarget | None = None
    if at is not None:
        if action is None:
            raise click.UsageError("--at needs --do")
        if action == Action.HOLD and hold_file is None:
            raise click.UsageError("--do hold needs --hold-file")
        try:
            target = FailpointTarget.read(at, Action(action), hold_file)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    failpoint.arm(point_handler(target, trace))
    sys.argv = ["dtx", *words]
    runpy.run_module("dtx", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
