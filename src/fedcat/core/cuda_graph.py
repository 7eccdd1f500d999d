"""Work that is captured once as a CUDA graph and replayed without the host."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from fedcat.core.device import current_device, stream_for


def capture(work: Callable[[], object], device: torch.device, pool: Any = None) -> Any:
    """Return a CUDA graph of `work`, which is run once before, to compile kernels and allocate workspaces.

    `work` must read and write memory that stays where it is. Graphs that share a `pool` share their temporary memory.
    Libraries keep a workspace per stream, so graphs that are captured on one stream must not run at the same time. The
    default stream cannot be captured; another one stands in for it.
    """
    with current_device(device):
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            stream = stream_for("captures", device)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # an old graph that is collected during a capture makes it fail
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                work()
        finally:
            if collects:
                gc.enable()
        return graph
