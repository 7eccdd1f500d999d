"""The stacked engine: all rows of a launch train together, one step of each at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fedcat.core.precision import precision_context
from fedcat.engines.base import Engine, Job
from fedcat.engines.batch_order import steps_of
from fedcat.engines.captured import CapturedLaunches
from fedcat.engines.gradients.choose import eager_gradients
from fedcat.engines.gradients.loss_check import check_loss
from fedcat.engines.gradients.trials import stack_size
from fedcat.engines.launch import Launch
from fedcat.engines.steps import EagerSteps
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import Task


class StackedEngine(Engine):
    """Trains hops that share a net as one matrix of rows.

    Rows may differ in their number of steps, batch lengths, learning rates, momenta and rules. A row that has taken
    its last step is dropped from the launch. On a CPU, steps are taken one by one (`EagerSteps`); on a GPU, they are
    captured once and replayed (`StepGraphs`). What computes the gradients is decided in `gradients.choose`.

    In exact mode, batches are always padded to one length, and stacks have a number of rows at which a row's bits do
    not depend on the other rows (see `stack_size`).
    """

    name = "stacked"

    def __init__(self, exact: bool = False, precision: str = "fp32", memory: float | None = None) -> None:
        super().__init__(exact, precision, memory)
        self._captured = CapturedLaunches(exact, precision, memory)

    def train(self, jobs: Sequence[Job]) -> list[Reply]:
        """Train the hops; those that can share a launch train together."""
        launches: dict[Hashable, list[int]] = {}
        keys: dict[Task, tuple[Hashable, ...]] = {}
        for position, (task, hop) in enumerate(jobs):
            if task not in keys:
                keys[task] = self._key(task)
            brought = (*hop.sent, *hop.memory) if task.rule.own_loss else ()
            launches.setdefault((keys[task], brought), []).append(position)
        replies: dict[int, Reply] = {}
        with precision_context(self.precision):
            for positions in launches.values():
                rules = list(dict.fromkeys(jobs[p][0].rule for p in positions))
                positions.sort(key=lambda p: -steps_of(*jobs[p]))
                some = [jobs[p] for p in positions]
                self._check_loss(some[0])
                captured = self._captured.takes(some[0][0])
                found = self._captured.train(some, rules) if captured else self._train(some, rules)
                replies.update(zip(positions, found, strict=True))
        return [replies[p] for p in range(len(jobs))]

    def _key(self, task: Task) -> tuple[Hashable, ...]:
        """Return what tasks have in common whose hops can share a launch."""
        same = (task.layout.id, task.pool.id, task.loss_key, task.optimizer, task.augment)
        if task.rule.own_loss:  # what a rule draws may depend on the batch size
            return *same, task.padding, task.batch_size
        return *same, task.padding if self.exact else task.padding.bit_length()

    def _check_loss(self, job: Job) -> None:
        """Test a loss before its first use with a net."""
        task, hop = job
        if not task.plain_loss:
            task.layout.once(("loss", task.pool.id, task.loss_key, *hop.sent), lambda: check_loss(job))

    def _train(self, jobs: list[Job], rules: Sequence[LocalRule]) -> list[Reply]:
        """Train hops, given longest first, step by step in stacks of at most the allowed size."""
        task = jobs[0][0]
        batch = max(task.padding for task in {task for task, _ in jobs})
        gradients = eager_gradients(task, self.precision)
        size = stack_size(gradients, batch, self.exact)
        most = size.most or len(jobs)
        replies = []
        for begin in range(0, len(jobs), most):
            launch = Launch(jobs[begin : begin + most], rules, size, batch)
            replies += launch.replies(*EagerSteps(launch, gradients, self.exact).run())
        return replies

    def kernels(self, task: Task) -> str:
        """Return a description of what computes a task's steps."""
        if self._captured.takes(task):
            return self._captured.kernels(task)
        return eager_gradients(task, self.precision).name

    def release(self) -> None:
        """Free memory that was kept for the next call."""
        self._captured.release()
