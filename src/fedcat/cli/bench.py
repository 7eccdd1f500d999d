"""The command `fedcat bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedcat.bench.measure import Bench, Case, Timing
from fedcat.bench.tables import figures, machine, show_timings
from fedcat.bench.workload import IMAGES, Workload
from fedcat.cli.tables import say
from fedcat.core.device import find_device
from fedcat.core.errors import SettingError, unknown_name
from fedcat.core.files import replacing
from fedcat.core.options import check_bounds
from fedcat.core.precision import PRECISIONS
from fedcat.engines import NAMES as ENGINES

out = Console(highlight=False, markup=False)


def bench(
    nets: Annotated[str, typer.Option(metavar="NAME,...", help="nets to time")] = "digits-cnn,lab-cifar,mcmahan-mnist",
    engines: Annotated[str, typer.Option(metavar="NAME,...", help="auto, sequential, stacked")] = "auto,sequential",
    precisions: Annotated[str, typer.Option(metavar="NAME,...", help="fp32, tf32 (GPU), bf16")] = "fp32",
    runs: Annotated[str, typer.Option(metavar="N,...", help="numbers of runs side by side")] = "1",
    per_round: Annotated[int, typer.Option(help="clients per round, K")] = 10,
    clients: Annotated[int, typer.Option(help="number of clients, N")] = 100,
    epochs: Annotated[int, typer.Option(help="local epochs per hop")] = 1,
    alpha: Annotated[float, typer.Option(help="concentration of the Dirichlet partition")] = 0.5,
    samples: Annotated[int | None, typer.Option(help="total samples [as in the net's dataset]")] = None,
    turns: Annotated[int, typer.Option(help="rounds to time, alternating with the plain loop")] = 3,
    exact: Annotated[
        bool | None,
        typer.Option("--exact/--no-exact", metavar=" ", help="same bits no matter what else runs [on for a CPU]"),
    ] = None,
    device: Annotated[str, typer.Option(help="PyTorch device: auto, cpu, cuda, cuda:0, ...")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="write all results to this file")] = None,
) -> None:
    """Time the engines against a plain PyTorch loop in the same process.

    The loop has one model, a new optimizer per client, and batches sliced from a tensor or from a DataLoader. It runs
    the same FedAvg rounds on random images as the engines, alternating with them.

    Columns: round and step are the times of one run's round and of one local step; plain and loader are how many times
    longer the loop took, without and with a DataLoader; matrix is the share of the rate of large matrix products on
    this machine; first is the time of the first round, including compilation.
    """
    where = find_device(device)
    for name, value in (("per_round", per_round), ("clients", clients), ("epochs", epochs), ("turns", turns)):
        check_bounds(name, value, at_least=1)
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise SettingError(f"--json must be a file in an existing directory, got {str(json_file)!r}")
    if samples is not None:
        check_bounds("samples", samples, at_least=2 * clients)
    chosen = _names("nets", nets, IMAGES)
    cases = [
        Case(engine, precision, count, exact)
        for engine in _names("engines", engines, ENGINES)
        for precision in _names("precisions", precisions, PRECISIONS)
        for count in _counts(runs)
    ]
    about = machine(where)
    say(out, f"{about['device']}, {about['threads']} threads, PyTorch {about['torch']}, fedcat {about['fedcat']}")
    say(out, f"K = {per_round} of N = {clients} clients, alpha {alpha:g}, epochs {epochs}\n")
    benches: list[Bench] = []
    timings: list[Timing] = []
    for net in chosen:
        made = Bench(Workload(net, per_round, clients, epochs, alpha, samples), where, turns)
        benches.append(made)
        found = [made.time(case) for case in cases]
        timings += found
        show_timings(out, net, found)
        loop = f"plain loop threads: {made.loop_threads}" if where.type == "cpu" else ""
        rates = ", ".join(f"{p} {made.rate(p) / 1e12:.3g}" for p in dict.fromkeys(case.precision for case in cases))
        say(out, f"measured matrix rate, TFLOP/s: {rates}" + (f"; {loop}" if loop else "") + "\n")
    if json_file is not None:
        with replacing(json_file) as temporary:
            temporary.write_text(json.dumps(figures(benches, timings, where), indent=2) + "\n")
        say(out, f"results: {json_file}")


def _names(label: str, text: str, known: object) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    every = list(known)  # type: ignore[call-overload]
    for name in names:
        if name not in every:
            raise unknown_name(label, name, every)
    if not names:
        raise SettingError(f"{label} must name at least one of {', '.join(every)}, got {text!r}")
    return names


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingError(f"runs must be integers such as 1,6, got {text!r}") from error
    for count in counts:
        check_bounds("runs", count, at_least=1)
    return counts
