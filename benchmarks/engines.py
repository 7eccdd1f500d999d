"""The sequential engine against the stacked one: the measurements behind the rule of `--engine auto`.

    python benchmarks/engines.py [--device cpu] [--nets digits-cnn lab-cifar] [--batch-sizes 10 50] [--per-round 10]
        [--samples 100] [--json FILE]

FedAvg rounds on random images: every client holds --samples samples, one local epoch. Both engines do the same work,
with as many processes as `fedcat run` uses. They alternate, and the best of several rounds counts. The last columns
are the speedup of stacked, and the kernels that it uses.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np
import torch

import fedcat
from fedcat.core.device import find_device
from fedcat.models.traits import traits
from fedcat.runs.build import Builder

SHAPES = {
    "digits-cnn": (1, 8, 8),
    "lab-mnist": (1, 28, 28),
    "lab-cifar": (3, 32, 32),
    "lab-femnist": (1, 28, 28),
    "mcmahan-mnist": (1, 28, 28),
    "mcmahan-cifar": (3, 32, 32),
}


def federation(shape: tuple[int, ...], clients: int, samples: int) -> fedcat.Federation:
    """Return a federation of random images."""
    rng = np.random.default_rng(0)
    total = clients * samples
    images = rng.integers(256, size=(total, *shape), dtype=np.uint8)
    train = fedcat.Pool(images, rng.integers(10, size=total))
    test = fedcat.Pool(images[:10], rng.integers(10, size=10))
    return fedcat.Federation(train, test, np.arange(total) % clients, classes=10)


def seconds_per_round(run: fedcat.Run) -> float:
    """Train one round and return its seconds, without evaluation."""
    jobs = run.plan()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    replies = run.engine.train(jobs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - begin
    run.absorb(replies)
    run.record({})
    return elapsed


def measure(net: str, batch_size: int, words: argparse.Namespace) -> dict[str, object]:
    """Return the measurements of one net and batch size."""
    data = federation(SHAPES[net], words.per_round, words.samples)
    builder = Builder()
    given = {"dataset": data, "net": net, "batch_size": batch_size, "epochs": 1, "fraction": 1.0, "rounds": 10**6}
    given |= {"method": "fedavg", "device": words.device, "exact": words.exact, "evaluate_every": 10**6, "lr": 1e-4}
    pair = {e: builder.build({**given, "engine": e}) for e in ("sequential", "stacked")}
    if pair["stacked"].engine.name != "stacked":
        raise SystemExit(f"{net} cannot be stacked on this device: nothing to compare")
    best = {e: float("inf") for e in pair}
    for turn in range(words.turns + 1):
        for engine, run in pair.items():
            elapsed = seconds_per_round(run)
            if turn:
                best[engine] = min(best[engine], elapsed)
    task = pair["stacked"].task
    kernels = {e: run.engine.kernels(task) for e, run in pair.items()}
    for run in pair.values():
        run.engine.release()
    flops = traits(task.layout, task.pool).flops * batch_size
    return {
        "net": net,
        "batch_size": batch_size,
        "mflop_forward": flops / 1e6,
        "kernels": kernels,
        "rounds_per_second": {e: 1 / seconds for e, seconds in best.items()},
        "ratio": best["sequential"] / best["stacked"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--nets", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[10, 50])
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    device = find_device(words.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{device} ({name}), torch {torch.__version__}, K = {words.per_round}, {words.samples} samples per client")
    print(f"{'net':14} {'batch':>5} {'MFLOP/batch':>13} {'sequential':>12} {'stacked':>12} {'speedup':>7}")
    rows = []
    for net in words.nets:
        for batch_size in words.batch_sizes:
            row = measure(net, batch_size, words)
            rows.append(row)
            speed = row["rounds_per_second"]
            print(
                f"{net:14} {batch_size:5} {row['mflop_forward']:13.1f} {speed['sequential']:10.2f}/s "
                f"{speed['stacked']:10.2f}/s {row['ratio']:6.2f}x  {row['kernels']['stacked']}",
                flush=True,
            )
    if words.json:
        settings = {k: v for k, v in vars(words).items() if k != "json"}
        machine = {"device": name, "torch": torch.__version__, "python": platform.python_version()}
        words.json.write_text(json.dumps({"settings": settings, "machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
