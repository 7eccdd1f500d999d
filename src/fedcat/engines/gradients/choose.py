"""Which gradients train a net: the only place where that is decided."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from fedcat.engines.base import Job
from fedcat.engines.batch_order import drawn_by, local_of
from fedcat.engines.gradients.base import Gradients, Inputs
from fedcat.engines.gradients.chain import Chain, chain_of
from fedcat.engines.gradients.manual import manual_gradients
from fedcat.engines.gradients.outputs_loss import OutputsLoss, SeesMore
from fedcat.engines.gradients.trials import disagrees
from fedcat.engines.gradients.vmap import VmapGradients, VmapTritonGradients
from fedcat.protocol.task import Task, stack

LARGEST_BATCH = 1024


def eager_gradients(task: Task) -> Gradients:
    """Return the gradients for steps that are taken one by one, on a CPU: always in full precision."""
    if task.plain_loss:
        found = manual_gradients(task.layout, task.pool, task.padding)
        if found is not None:
            return found
    return _vmap(task, "fp32")


def captured_gradients(job: Job, batch: int, precision: str) -> tuple[Gradients, str]:
    """Return the gradients for captured steps on a GPU, and why they are not the Triton kernels; empty if they are."""
    task, hop = job
    key = (task.pool.id, batch, precision, task.loss_key, bool(task.augment), hop.brings)
    found = task.layout.once(("kernels", key), lambda: _triton(job, batch, precision))
    if not isinstance(found, str):
        return found, ""
    fast = task.layout.once(("layers", key), lambda: _fast_layers(job, batch, precision))
    return _vmap(task, precision, VmapTritonGradients if fast else VmapGradients), found


def _vmap(task: Task, precision: str, kind: type[VmapGradients] = VmapGradients) -> Gradients:
    return kind(task.layout, task.pool, precision, task.rule, task.loss)


def _fast_layers(job: Job, batch: int, precision: str) -> bool:
    """Return whether Triton kernels compute a net's convolutions and LSTMs under `torch.vmap`."""
    task, _ = job
    has_some = any(isinstance(module, nn.Conv2d | nn.LSTM) for module in task.layout.net.modules())
    if not has_some or _no_kernels(task, batch):
        return False
    return not disagrees(_vmap(task, precision, VmapTritonGradients), batch, _first_inputs(job))


def _triton(job: Job, batch: int, precision: str) -> Gradients | str:
    """Return the Triton kernels for a job's net and loss, or why they cannot train it."""
    task, _ = job
    why = "its inputs are augmented" if task.augment else _no_kernels(task, batch)
    if why:
        return why
    chain = chain_of(task.layout, task.pool)
    if isinstance(chain, str):
        return chain
    from fedcat.engines.gradients.triton.gradients import TritonGradients

    given: Inputs = {}
    outputs_loss = None
    if not task.plain_loss:
        outputs_loss = OutputsLoss(task.layout, task.pool, task.rule, task.loss)
        given = _first_inputs(job)
        why = _sees_more(outputs_loss, job, chain, given)
        if why:
            return why
    made = TritonGradients(task.layout, task.pool, chain, precision, outputs_loss)
    return disagrees(made, batch, given) or made


def _no_kernels(task: Task, batch: int) -> str:
    if task.layout.dtype != torch.float32:
        return "its parameters are not float32"
    if batch > LARGEST_BATCH:
        return f"its batches are larger than {LARGEST_BATCH}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def _first_inputs(job: Job) -> Inputs:
    """Return what a job's loss gets in its first step, for two rows."""
    task, hop = job
    start = hop.start[: task.layout.parameter_size].expand(2, -1)
    drawn = {n: t[0].to(hop.start.device) for n, t in drawn_by(job, 1).items()} if task.rule.own_loss else {}
    parts = {"sent": hop.sent, "memory": hop.memory, "local": local_of(job), "drawn": drawn}
    return {"start": start, **{name: stack([part, part]) for name, part in parts.items()}}


def _sees_more(loss: OutputsLoss, job: Job, chain: Chain, inputs: Inputs) -> str:
    """Return in which way a loss sees more of the net than its outputs; empty if it does not."""
    task, hop = job
    p = hop.start[: task.layout.parameter_size].expand(2, -1)
    index = torch.zeros(2, 3, dtype=torch.int64, device=p.device)
    try:
        loss.of(p.new_zeros(2, 3, chain.linear[-1].units), p, index, inputs)
    except SeesMore as error:
        return f"the loss sees more than the net's outputs: {error}"
    except Exception as error:  # a user's loss that fails here may do so for any reason
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"the loss sees more than the net's outputs: {first}"
    return ""
