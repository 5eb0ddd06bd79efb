"""Samples the functions of a running Python process with py-spy."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final, Self

RATE: Final = 500
"""Samples per second."""
_LOOP: Final = "Runner.run (asyncio/"


class Profiler:
    """Samples a process. Use as a context manager.

    Args:
        pid: of the process.
        seconds: limit of the duration.
        target: file for the stacks, one in each line with its count ("collapsed", the input of flame graphs).
        native: also show C code (uvloop, system calls), at some cost.

    Raises:
        SystemExit: py-spy is not installed.
    """

    def __init__(self, pid: int, seconds: int, target: Path, *, native: bool = False) -> None:
        program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if program is None:
            raise SystemExit("py-spy is not installed: pip install py-spy")
        target.parent.mkdir(parents=True, exist_ok=True)
        self._target = target
        words = ("--native",) if native else ("--nonblocking",)
        self._command = [
            *(program, "record", "--pid", str(pid), "--duration", str(seconds), "--rate", str(RATE), *words),
            *("--format", "raw", "--output", str(target)),
        ]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen[bytes](
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            errors = self._process.communicate(timeout=30)[1]
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            errors = self._process.communicate()[1]
        if not self._target.exists():
            raise SystemExit(f"py-spy failed: {errors.decode(errors='replace').strip()[-300:]}")

    def summary(self, count: int = 25) -> str:
        """Return the functions with the most samples of their own, and with the most including callees."""
        own: Counter[str] = Counter()
        below: Counter[str] = Counter()
        total = 0
        for line in self._target.read_text().splitlines():
            stack, _, samples = line.rpartition(" ")
            frames = [frame.rpartition(":")[0] or frame for frame in stack.split(";")]
            # the frames that lead to the event loop are in every stack, so they are left out
            frames = frames[max((place for place, name in enumerate(frames) if name.startswith(_LOOP)), default=0) :]
            own[frames[-1]] += int(samples)
            for frame in set(frames):
                below[frame] += int(samples)
            total += int(samples)
        if not total:
            return "no samples"
        lines = ["   own  with callees"]
        lines += [
            f"{number / total:6.1%}  {below[name] / total:6.1%}  {name}" for name, number in own.most_common(count)
        ]
        lines.append("with callees, the most")
        lines += [f"        {number / total:6.1%}  {name}" for name, number in below.most_common(count)]
        return "\n".join(lines)
