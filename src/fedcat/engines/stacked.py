"""The stacked engine: all rows of a launch train together, one step of each at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from fedcat.core.precision import precision_context
from fedcat.engines.base import Engine, Job
from fedcat.engines.batch_order import steps_of
from fedcat.engines.captured import CapturedLaunches
from fedcat.engines.gradients.choose import eager_gradients
from fedcat.engines.gradients.loss_check import check_loss
from fedcat.engines.gradients.trials import stack_size
from fedcat.engines.launch import Launch, Trained
from fedcat.engines.steps import EagerSteps
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import Task

HALVED = 64
"""Number of hops from which those of several runs train as two halves."""


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
        self._started: deque[Callable[[], list[Reply]]] = deque()

    def train(self, jobs: Sequence[Job]) -> list[Reply]:
        """Train the hops; those that can share a launch train together."""
        return self._start(jobs)()

    def collect(self, timeout: float | None = None) -> list[Reply]:
        """Return the replies of the launches that were started first, after the hops that were queued are started.

        On a GPU, the hops of many runs train as two halves, which take turns: while one trains, the host works for the
        runs of the other. With a `timeout` all replies are returned at once: no hop must be late for want of a turn.
        """
        if self._submitted and not self._captured.takes(self._submitted[0][0]):
            return super().collect(timeout)
        jobs, self._submitted = self._submitted, []
        if jobs:
            parts = self._halves(jobs) if timeout is None else [jobs]
            self._started += [self._start(part) for part in parts]
        if not self._started:
            raise RuntimeError("nothing to collect: no hop was submitted")
        replies = self._started.popleft()()
        while timeout is not None and self._started:
            replies += self._started.popleft()()
        return replies

    def _halves(self, jobs: Sequence[Job]) -> list[Sequence[Job]]:
        """Return the hops in one or two parts; a run's hops stay together."""
        runs = list(dict.fromkeys(task.run for task, _ in jobs))
        if self._started or len(runs) < 2 or len(jobs) < HALVED:
            return [jobs]
        first = set(runs[: len(runs) // 2])
        return [[job for job in jobs if (job[0].run in first) == half] for half in (True, False)]

    def _start(self, jobs: Sequence[Job]) -> Callable[[], list[Reply]]:
        """Start to train hops; return a function that waits for the replies, in the order of the jobs."""
        launches: dict[Hashable, list[int]] = {}
        keys: dict[Task, tuple[Hashable, ...]] = {}
        for position, (task, hop) in enumerate(jobs):
            if task not in keys:
                keys[task] = self._key(task)
            launches.setdefault((keys[task], hop.brings if task.rule.own_loss else ()), []).append(position)
        started: list[tuple[list[int], list[Trained]]] = []
        with precision_context(self.precision):
            for positions in launches.values():
                rules = list(dict.fromkeys(jobs[p][0].rule for p in positions))
                positions.sort(key=lambda p: -steps_of(*jobs[p]))
                some = [jobs[p] for p in positions]
                self._check_loss(some[0])
                captured = self._captured.takes(some[0][0])
                started.append((positions, (self._captured.start if captured else self._train)(some, rules)))

        def replies() -> list[Reply]:
            found: list[tuple[int, Reply]] = []
            for positions, launches in started:
                arrived = [reply for launch in launches for reply in launch.replies()]
                found += zip(positions, arrived, strict=True)
            return [reply for _, reply in sorted(found, key=lambda pair: pair[0])]

        return replies

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
            task.layout.once(("loss", task.pool.id, task.loss_key, hop.brings), lambda: check_loss(job))

    def _train(self, jobs: list[Job], rules: Sequence[LocalRule]) -> list[Trained]:
        """Train hops, given longest first, step by step in stacks of at most the allowed size."""
        task = jobs[0][0]
        batch = max(task.padding for task in {task for task, _ in jobs})
        gradients = eager_gradients(task)
        size = stack_size(gradients, batch, self.exact)
        most = size.most or len(jobs)
        trained = []
        for begin in range(0, len(jobs), most):
            launch = Launch(jobs[begin : begin + most], rules, size, batch)
            trained.append(Trained(launch, *EagerSteps(launch, gradients, self.exact).run()))
        return trained

    def kernels(self, task: Task) -> str:
        """Return a description of what computes a task's steps."""
        if self._captured.takes(task):
            return self._captured.kernels(task)
        return eager_gradients(task).name

    def forget(self) -> None:
        """Drop the hops that were submitted, also those that have started, as soon as nothing reads them."""
        super().forget()
        self._captured.wait()
        self._started.clear()

    def release(self) -> None:
        """Free memory that was kept for the next call."""
        self._captured.release()
