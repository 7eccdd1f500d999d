"""The reference engine: one client after another, in plain PyTorch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedcat.core.precision import bf16_autocast, precision_context
from fedcat.core.rng import Purpose, random_stream, torch_seed
from fedcat.engines.base import Engine, Job
from fedcat.engines.batch_order import (
    augment_numbers,
    batches,
    drawn_by,
    learning_rate,
    local_of,
    mean_learning_rate,
    reported_by,
)
from fedcat.models.traits import channels_last, convolved, traits
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import Batch, LocalRule, LossInputs, call_hook, unchanged
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import Task, stack


class SequentialEngine(Engine):
    """Trains each hop separately with autograd and an optimizer of ``torch.optim``."""

    name = "sequential"

    def train(self, jobs: Sequence[Job]) -> list[Reply]:
        """Train the hops in order."""
        with precision_context(self.precision):
            return [train_one(task, hop, self.precision) for task, hop in jobs]


def train_one(task: Task, hop: Hop, precision: str = "fp32") -> Reply:
    """Train one hop."""
    begin, layout = time.perf_counter(), task.layout
    index, lengths = batches(task, hop)
    where = torch.from_numpy(index).to(hop.start.device)
    drawn = drawn_by((task, hop), len(index)) if task.rule.own_loss else {}
    drawn = {n: t.to(hop.start.device) for n, t in drawn.items()}
    numbers = augment_numbers((task, hop), len(index))
    local, (first, decay) = _Local(task, hop, precision), learning_rate(task, hop, len(lengths))
    layout.net.train()
    total = torch.zeros((), dtype=layout.dtype, device=hop.start.device)
    gpus = [hop.start.device] if hop.start.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(torch_seed(random_stream(task.seed, Purpose.NET, hop.round, hop.client, hop.visit)))
        for step, length in enumerate(lengths.tolist()):
            part = where[step, :length]
            x, y = task.pool.inputs(part, layout.dtype), task.pool.targets(part, layout.dtype)
            if numbers is not None:
                x = task.augment(x, numbers[step, :length].to(x.device))
            batch = Batch(local.lay(x), y, None, task.loss)
            total += local.step(batch, {n: t[step] for n, t in drawn.items()}, first / (1 + decay * step))
    reply = local.reply(len(lengths), float(total) / len(lengths))
    return replace(reply, seconds=time.perf_counter() - begin)


class _Local:
    """One client during training: leaf tensors that are views of one row, and an optimizer over them."""

    def __init__(self, task: Task, hop: Hop, precision: str) -> None:
        layout = task.layout
        self.task, self.hop, self.precision = task, hop, precision
        self.p = hop.start[: layout.parameter_size].clone()
        self.leaves = {n: v.detach().requires_grad_() for n, v in layout.parameter_views(self.p).items()}
        self.buffers = layout.buffer_views(hop.start[layout.parameter_size :])
        self.optimizer = task.optimizer.of(list(self.leaves.values()), hop.lr, task.momentum, task.weight_decay)
        self.sent, self.memory = stack([hop.sent]), stack([hop.memory])
        self.local = local_of((task, hop)) if task.rule.own_loss else {}
        self.start = hop.start[None, : layout.parameter_size]
        last = layout.device.type == "cpu" and traits(layout, task.pool).channels_last
        self.turned = set(convolved(layout)) if last else set()
        self.changes_gradient = type(task.rule).gradient is not LocalRule.gradient
        self.changes_step = type(task.rule).after is not LocalRule.after

    def lay(self, values: Tensor) -> Tensor:
        """Return images or weights in the memory format that a CPU convolves fastest, if the net supports it."""
        return channels_last(values) if self.turned else values

    def step(self, batch: Batch, drawn: dict[str, Tensor], lr: float) -> Tensor:
        """Take one step with a learning rate and return the loss before it."""
        rule, hop = self.task.rule, self.hop
        # views, not the leaves: on a GPU, RNNBase points the tensors that it is given to other memory
        leaves = {n: self.lay(leaf) if n in self.turned else leaf.view_as(leaf) for n, leaf in self.leaves.items()}
        net = self.task.layout.bind(leaves, self.buffers)
        inputs = LossInputs(self.start[0], hop.sent, hop.memory, self.local, drawn)
        with (
            bf16_autocast(self.precision, self.p.device),
            unchanged(rule, "loss", self.start, hop.sent, hop.memory, self.local, drawn),
        ):
            loss = rule.loss(net, batch, inputs)
        grads = torch.autograd.grad(loss, list(self.leaves.values()), materialize_grads=True)
        self.buffers = {n: b.detach() for n, b in net.buffers.items()}
        if self.changes_gradient:
            flat = torch.cat([g.reshape(-1) for g in grads])[None]
            flat = call_hook(rule, "gradient", flat, self.p[None], self.start, self.sent, self.memory)[0]
            grads = tuple(self.task.layout.parameter_views(flat).values())
        for leaf, grad in zip(self.leaves.values(), grads, strict=True):
            leaf.grad = grad.contiguous()  # the fused optimizer expects contiguous memory
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(list(self.leaves.values()), self.task.clip)
        if self.task.lr_decay:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        self.optimizer.step()
        if self.changes_step:
            rate = self.p.new_tensor([[lr]])
            self.p.copy_(call_hook(rule, "after", self.p[None], rate, self.sent, self.memory)[0])
        return loss.detach()

    def reply(self, steps: int, loss: float) -> Reply:
        """Return the reply after the last step."""
        task, hop = self.task, self.hop
        rate = mean_learning_rate(task, hop, steps)
        column = [self.p.new_tensor([[value]]) for value in (steps, rate, task.momentum)]
        uploads, memory = call_hook(task.rule, "finish", self.start, self.p[None], *column, self.sent, self.memory)
        buffers = [b.reshape(-1) for b in self.buffers.values()]
        return Reply(
            hop=hop.id,
            run=task.run,
            end=torch.cat([self.p, *buffers]),
            samples=task.samples(hop.client),
            steps=steps,
            loss=loss,
            uploads={**{n: t[0] for n, t in uploads.items()}, **reported_by((task, hop))},
            memory={n: t[0] for n, t in memory.items()},
        )
