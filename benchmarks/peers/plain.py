"""The plain loop alone: with one and two threads, with tensor slices and with a DataLoader."""

from __future__ import annotations

import json
import time

import torch
from work import WORKS, Plain, command_line, versions


def main() -> None:
    """Time the four variants in turns and write the results."""
    words = command_line()
    variants = {
        (batches, threads): Plain(WORKS[words.work], loader=batches == "loader")
        for batches in ("slices", "loader")
        for threads in (1, 2)
    }
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in variants}
    for turn in range(words.rounds + 1):
        for key, plain in variants.items():
            torch.set_num_threads(key[1])
            begin = time.perf_counter()
            plain.round()
            if turn:
                seconds[key].append(time.perf_counter() - begin)
    found = {f"{batches}, {threads} thread{'s' * (threads - 1)}": s for (batches, threads), s in seconds.items()}
    threads = min((1, 2), key=lambda threads: min(seconds["slices", threads]))
    words.out.write_text(
        json.dumps({"work": words.work, "threads": threads, "seconds": found, "versions": versions()}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
