"""Benchmark results as a table and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fedcat.bench.measure import Bench, Timing
from fedcat.version import __version__


def machine(device: torch.device) -> dict[str, Any]:
    """Return the hardware and the software versions of the measurements."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "device": gpu or _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fedcat": __version__,
    }


def _processor() -> str:
    return platform.processor() or platform.machine()


def show_timings(console: Console, net: str, timings: Sequence[Timing]) -> None:
    """Print one line per case of a net."""
    table = Table(box=None, pad_edge=False)
    table.add_column(net, no_wrap=True)
    for name in ("runs", "round", "step", "plain", "loader", "matrix", "first"):
        table.add_column(name, justify="right", no_wrap=True)
    for timing in timings:
        case = timing.case
        exact = {None: "", True: " exact", False: ""}[case.exact]
        table.add_row(
            f"{timing.engine} {case.precision}{exact}",
            str(case.runs),
            _time(timing.seconds),
            _time(timing.step),
            f"{timing.ratio:.2f}",
            f"{timing.loader_ratio:.2f}",
            f"{timing.share:.1%}",
            _time(timing.start),
        )
    console.print(table)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def figures(benches: Sequence[Bench], timings: Sequence[Timing], device: torch.device) -> dict[str, Any]:
    """Return all results as plain values."""
    rates: dict[str, float] = {}
    for bench in benches:
        rates |= bench._rates
    work = [
        {
            "net": bench.work.net,
            "per_round": bench.work.per_round,
            "clients": bench.work.clients,
            "epochs": bench.work.epochs,
            "alpha": bench.work.alpha,
            "batch_size": bench.work.batch_size,
            "samples": bench.work.samples or bench.work.images.samples,
            "turns": bench.turns,
            "plain_loop_threads": bench.loop_threads,
            "flops_per_step": bench.flops,
        }
        for bench in benches
    ]
    return {
        "machine": machine(device),
        "matrix_rates": rates,
        "work": work,
        "timings": [timing.as_dict() for timing in timings],
    }
