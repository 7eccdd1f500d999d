"""What checkpoints cost, and how memory and checkpoints grow.

    python benchmarks/checkpoints.py share [OPTIONS OF fedcat compare]   the share of a comparison's time
    python benchmarks/checkpoints.py long [--rounds 10000]               memory over many rounds of the digits
    python benchmarks/checkpoints.py wide [--clients 100000]             SCAFFOLD's checkpoint with many clients

`share` prints the seconds in which training waited for a checkpoint, those of the thread that writes, and both as a
share of the time of the whole comparison. Without options it runs the demo, about a minute on two cores; `long` takes
some minutes, `wide` one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedcat
from fedcat.cli import app
from fedcat.runs.checkpoint import FOLDER, LAST, Checkpoints
from fedcat.runs.runner import execute

METHODS = "fedavg,fedprox,scaffold,fedgen,clusamp,fedcat"
DEMO = f"--methods {METHODS} --seeds 3 --dataset digits --alpha 0.1 --rounds 100 --lr 0.03"


class Clock:
    """Adds up the time of methods of a class."""

    def __init__(self, *names: str) -> None:
        self.seconds, self.calls = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        for name in names:
            setattr(Checkpoints, name, self._timed(name, getattr(Checkpoints, name)))

    def _timed(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*given, **named)
            finally:
                self.seconds[name] += time.perf_counter() - begin
                self.calls[name] += 1

        return timed


def share(words: list[str]) -> dict[str, Any]:
    """Run a comparison and measure its checkpoints."""
    clock = Clock("on_round", "on_close", "on_end", "_write")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        sys.argv = ["fedcat", "compare", *(words or DEMO.split()), "--out", str(out)]
        begin = 0.0
        runs = execute

        def timed(*given: Any, **named: Any) -> Any:
            nonlocal begin
            begin = time.perf_counter()
            try:
                return runs(*given, **named)
            finally:
                begin = time.perf_counter() - begin

        sys.modules["fedcat.runs.comparison"].execute = timed  # type: ignore[attr-defined]
        with contextlib.suppress(SystemExit):
            app.main()
        sizes = [path.stat().st_size for path in out.glob(f"*/{FOLDER}/{LAST}")]
    waited = clock.seconds["on_round"] + clock.seconds["on_close"] + clock.seconds["on_end"]
    return {
        "command": " ".join(words or DEMO.split()),
        "seconds": round(begin, 2),
        "checkpoints": clock.calls["_write"],
        "megabytes": [round(min(sizes) / 1e6, 3), round(max(sizes) / 1e6, 3)],
        "waited_seconds": round(waited, 3),
        "writing_seconds": round(clock.seconds["_write"], 3),
        "waited_percent": round(100 * waited / begin, 3),
        "writing_percent": round(100 * clock.seconds["_write"] / begin, 3),
    }


class Memory(fedcat.Callback):
    """Notes the memory of the process every so many rounds."""

    def __init__(self, every: int) -> None:
        self.every, self.found = every, dict[int, float]()

    def on_round(self, run: fedcat.Run, record: fedcat.Record) -> None:
        """Look at a round."""
        if record.round % self.every == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.found[record.round] = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
            print(f"round {record.round}: {self.found[record.round]} MB", flush=True)


def long(words: list[str]) -> dict[str, Any]:
    """Run many rounds and note the memory."""
    rounds = int(words[words.index("--rounds") + 1]) if "--rounds" in words else 10_000
    memory = Memory(rounds // 20)
    with tempfile.TemporaryDirectory() as folder:
        given = {"dataset": "digits", "method": "fedcat", "rounds": rounds, "epochs": 1, "workers": 1, "threads": 1}
        result = fedcat.run(out=Path(folder) / "run", callbacks=[memory], evaluate_every=100, **given)
        files = {path.name: path.stat().st_size for path in (Path(folder) / "run").rglob("*") if path.is_file()}
    places, values = np.array(list(memory.found)), np.array(list(memory.found.values()))
    half = places >= rounds / 2
    slope = np.polyfit(places[half], values[half], 1)[0]
    return {
        "megabytes": memory.found,
        "kilobytes_per_round": round(1000 * slope, 3),
        "files": files,
        "status": result.status,
    }


def wide(words: list[str]) -> dict[str, Any]:
    """Run SCAFFOLD with many clients and look at its checkpoint."""
    clients = int(words[words.index("--clients") + 1]) if "--clients" in words else 100_000
    torch.manual_seed(0)
    x, y = torch.rand(clients, 8), torch.arange(clients) % 4
    data = fedcat.Federation(fedcat.Pool(x, y), fedcat.Pool(x[:100], y[:100]), torch.arange(clients).numpy())
    with tempfile.TemporaryDirectory() as folder:
        given = {"method": "scaffold", "net": "mlp", "per_round": 50, "rounds": 20, "epochs": 1, "evaluate_every": 10}
        result = fedcat.run(dataset=data, out=Path(folder) / "run", **given)
        size = (Path(folder) / "run" / FOLDER / LAST).stat().st_size
    row = sum(parameter.numel() for parameter in result.model().parameters()) * 4
    took_part = len({hop.client for record in result.history for hop in record.hops})
    return {
        "clients": clients,
        "took_part": took_part,
        "row_bytes": row,
        "checkpoint_megabytes": round(size / 1e6, 3),
        "of_those_that_took_part_megabytes": round(took_part * row / 1e6, 3),
        "of_all_megabytes": round(clients * row / 1e6, 3),
    }


def main() -> None:
    """Measure and print."""
    commands = {"share": share, "long": long, "wide": wide}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    print(json.dumps(commands[sys.argv[1]](sys.argv[2:]), indent=1))


if __name__ == "__main__":
    main()
