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
    The default stream cannot be captured; another one stands in for it.

    cuBLAS keeps a workspace per stream, which PyTorch frees with any graph that was captured there, although others
    still write to it (PyTorch issue 193402). Workspaces are forgotten before and after a capture, so that each graph
    has one of its own.
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
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                work()
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            if collects:
                gc.enable()
        return graph
