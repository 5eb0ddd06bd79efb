"""The table at the end of a soak."""

from tests.evidence.soak.soak import Report

_SHOWN = 40


def table(report: Report) -> str:
    """Return all figures of *report* as text."""
    lines = [
        f"\nsoak {report.mode}: {report.seconds:.0f} s of harm in {report.rounds} rounds, seed {report.seed}",
        *_rows("transfers", {"committed": report.committed, "rolled back": report.rolled_back}),
        *_rows("of these", {name: n for name, n in report.counts.items() if name.partition(": ")[1] and n}),
        *_rows("nemesis", report.nemesis),
        *_rows("seen", {name: n for name, n in report.counts.items() if not name.partition(": ")[1]}),
        *_rows("dtx ended with status", {str(status): n for status, n in report.exits.items()}),
        *_rows(
            "found",
            {
                "branches in the log when dtx was killed": report.in_doubt,
                "looks of readers while money moved": report.looks,
                "repeats where RabbitMQ died (allowed, recognised)": report.repeated_by_broker_deaths,
                "lost": len(report.lost),
                "repeated": len(report.repeated),
                "wrong": len(report.wrong),
            },
        ),
    ]
    return "\n".join([*lines, *(f"!! {text}" for text in report.bad[:_SHOWN])])


def _rows(title: str, values: dict[str, int]) -> list[str]:
    return [f"  {title}", *(f"    {n:>8}  {name}" for name, n in sorted(values.items()))] if values else []
