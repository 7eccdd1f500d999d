"""Work that is captured once as a CUDA graph and replayed without the host."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from fedcat.core.device import current_device


def capture(work: Callable[[], object], device: torch.device, pool: Any = None) -> Any:
    """Return a CUDA graph of `work`, which is run once before, to compile kernels and allocate workspaces.

    `work` must read and write memory that stays where it is. Graphs that share a `pool` share their temporary memory.
    """
    with current_device(device):
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # an old graph that is collected during a capture makes it fail
        try:
            with torch.cuda.graph(graph, pool=pool):
                work()
        finally:
            if collects:
                gc.enable()
        return graph
