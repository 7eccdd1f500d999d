"""fedcat: whole rounds of a run that is built beforehand."""

from __future__ import annotations

import numpy as np
import torch
from work import CLASSES, LR, MOMENTUM, WORKS, Turns, Work, command_line, make_images

import fedcat
from fedcat.runs.build import Builder

SETTINGS = {
    "two processes": {"workers": 2},
    "one process, two threads": {"workers": 1},
    "two processes, bf16": {"workers": 2, "precision": "bf16"},
}


def federation(work: Work) -> fedcat.Federation:
    """Return the workload's data as a federation."""
    images, labels = make_images(work)
    x, y = images.reshape(-1, *work.shape), labels.reshape(-1)
    owners = np.repeat(np.arange(work.clients), work.samples)
    return fedcat.Federation(fedcat.Pool(x, y), fedcat.Pool(x[:CLASSES], y[:CLASSES]), owners, classes=CLASSES)


def main() -> None:
    """Time fedcat."""
    words = command_line()
    work = WORKS[words.work]
    given = {"dataset": federation(work), "net": work.net, "batch_size": work.batch, "epochs": work.epochs}
    given |= {"fraction": 1.0, "rounds": 10**6, "method": "fedavg", "device": "cpu", "evaluate_every": 10**6}
    given |= {"lr": LR, "momentum": MOMENTUM, "seed": 0, "engine": "auto", **SETTINGS[words.setting]}
    torch.set_num_threads(2)
    run = Builder().build(given)
    driver = fedcat.Driver([run])

    def row() -> object:
        return run.method.models()["global"].clone()

    absorb, taken = run.absorb, 0

    def counting(replies: list) -> None:
        nonlocal taken
        taken += sum(reply.steps for reply in replies)
        absorb(replies)

    turns = Turns(words, 2, row())
    for number in range(turns.total):
        run.absorb = counting if number == 0 else absorb
        turns.begin()
        driver.step()
        turns.end(row, taken)
    turns.report("fedcat", fedcat.__version__, engine=run.engine.name)


if __name__ == "__main__":
    main()
