"""The steps of a launch on a CPU, taken one by one."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.engines.gradients.base import Gradients, Inputs, Step, no_inputs
from fedcat.engines.launch import AUGMENT, Launch, padded
from fedcat.engines.rule_rows import norms
from fedcat.protocol.task import take, taken


class EagerSteps:
    """Takes the steps of a launch; rows that have taken their last step are dropped.

    Parameters
    ----------
    launch : Launch
        The rows.
    gradients : Gradients
        What computes their gradients.
    exact : bool
        Whether batches are always padded to the same length.
    """

    def __init__(self, launch: Launch, gradients: Gradients, exact: bool) -> None:
        self.launch, self.gradients, self.exact, self.size = launch, gradients, exact, launch.size
        self.device, self.optimizer = launch.device, launch.task.optimizer
        steps, split = int(launch.counts.max()), launch.layout.parameter_size
        index = np.full((len(launch.jobs), steps, launch.batch), -1, np.int64)
        launch.write(index, steps)
        self.index, self.lengths = torch.from_numpy(index).to(self.device), launch.lengths()
        drawn = padded(launch.drawn, len(launch.jobs), steps)
        drawn = {name: values.to(self.device) for name, values in drawn.items()}
        self.numbers = drawn.pop(AUGMENT, None)
        own = launch.task.rule.own_loss
        self.inputs = launch.rule_rows[0].loss_inputs(drawn) if own else no_inputs(launch.starts)
        self.ends = launch.starts.clone()
        self.p, self.buffers = launch.starts[:, :split].clone(), launch.starts[:, split:].clone()
        self.state = [torch.zeros_like(self.p) for _ in range(self.optimizer.slots)]
        columns = launch.columns()
        self.decays = any(columns["decay"])
        self.columns = {name: self.p.new_tensor(values)[:, None] for name, values in columns.items()}
        self.losses = self.p.new_zeros(len(launch.jobs))
        self.rows = np.arange(len(launch.jobs))
        self._keep(self.rows)

    def run(self) -> tuple[Tensor, Tensor]:
        """Take all steps; return the final rows and the sums of the losses."""
        self.launch.layout.net.train()
        last = int(self.launch.counts.max())
        for step in range(last):
            self._drop_finished(step)
            self._descend(self._gradients(step), step)
        self._drop_finished(last)
        return self.ends, self.losses

    def _drop_finished(self, step: int) -> None:
        """Write out the rows that have taken their last step and keep the others."""
        unfinished = self.launch.counts[self.rows] > step
        if unfinished.all():
            return
        done = np.flatnonzero(~unfinished)
        self.ends[self.rows[done]] = torch.cat([self.p, self.buffers], 1)[done]
        distinct = np.unique(self.rows[unfinished], return_index=True)[1]
        self._keep(np.flatnonzero(unfinished)[distinct])

    def _keep(self, which: NDArray[np.int64]) -> None:
        """Keep only some of the rows; a stack that becomes too small is padded with copies of the last row."""
        if 0 < len(which) < self.size.least:
            which = np.concatenate([which, which[-1:].repeat(self.size.least - len(which))])
        if len(which) == len(self.rows) and (which == np.arange(len(which))).all():
            return
        self.rows = self.rows[which]
        for rows in self.launch.rule_rows:
            rows.keep(self.rows)
        self.p, self.buffers = self.p[which], self.buffers[which]
        self.columns = {name: column[which] for name, column in self.columns.items()}
        self.state = [slot[which] for slot in self.state]

    def _gradients(self, step: int) -> Tensor:
        """Return the gradients of this step's losses; record the losses and the new buffers."""
        lengths = self.lengths[self.rows, step]
        length = self.index.shape[2] if self.exact else int(lengths.max())
        padded = self.exact or int(lengths.min()) < length
        index = self.index[self.rows, step, :length]
        numbers = None if self.numbers is None else self.numbers[self.rows, step, :length]
        given = (index, padded, self._inputs(step), self.launch.task.augment, numbers)
        losses, g, self.buffers = self.gradients.of(Step(self.p, self.buffers, *given))
        self.losses[self.rows] += losses
        return g

    def _inputs(self, step: int) -> Inputs:
        if not self.launch.task.rule.own_loss:
            return {}
        return {
            "start": take(self.inputs["start"], self.rows),
            **{name: taken(self.inputs[name], self.rows) for name in ("sent", "memory", "local")},
            "drawn": {name: values[self.rows, step] for name, values in self.inputs["drawn"].items()},
        }

    def _descend(self, g: Tensor, step: int) -> None:
        """Take one step of the optimizer with every rule's corrections."""
        g = self._by_rule(g, "gradient")
        at = self.columns
        if self.launch.clips:
            g = g * (at["clip"] / (norms(g, self.size) + 1e-6)).clamp(max=1.0)
        number, decay = torch.tensor(step + 1, device=self.device), at["decay"] if self.decays else None
        lr = at["lr"] / (1 + at["lr_decay"] * step) if self.launch.lr_decays else at["lr"]
        self.p = self.optimizer.step(self.p, g, self.state, number, lr, at["momentum"], decay)
        self.p = self._by_rule(self.p, "after", lr)

    def _by_rule(self, rows: Tensor, hook: str, lr: Tensor | None = None) -> Tensor:
        """Run a hook on the rows of each rule that overrides it."""
        overridden = "changes_gradient" if hook == "gradient" else "changes_step"
        if not any(getattr(mine, overridden) for mine in self.launch.rule_rows):
            return rows
        parts, begin = [], 0
        for mine in self.launch.rule_rows:
            stop = begin + mine.count
            part, p = rows[begin:stop], self.p[begin:stop]
            if stop > begin and getattr(mine, overridden):
                part = mine.gradient(part, p) if lr is None else mine.after(p, lr[begin:stop])
            parts.append(part)
            begin = stop
        return torch.cat(parts)
