"""The interface of engines, which train clients."""

from __future__ import annotations

from collections.abc import Sequence

from fedcat.protocol.hop import Hop, HopId
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import Task

Job = tuple[Task, Hop]


class Engine:
    """Trains the hops of one or more runs.

    An engine defines either `train`, if it trains hops while the caller waits, or `submit` and `collect`, if they train
    elsewhere; the other follows from it.

    Parameters
    ----------
    exact : bool
        Give the same bits no matter what else is trained at the same time.
    precision : str
        Precision of products in training: ``fp32``, ``tf32`` or ``bf16``. Evaluation always uses full precision.
    memory : float, optional
        Limit on GPU memory in bytes, met by splitting stacks; by default the free memory.
    """

    name: str
    one_per_client: bool = False
    """Whether a client can train only one hop at a time, as a real device does; the driver then keeps others back."""

    def __init__(self, exact: bool = False, precision: str = "fp32", memory: float | None = None) -> None:
        self.exact, self.precision, self.memory = exact, precision, memory
        self._submitted: list[Job] = []

    def __init_subclass__(cls) -> None:
        """Check that a subclass defines one side of the contract."""
        super().__init_subclass__()
        pair = cls.submit is not Engine.submit and cls.collect is not Engine.collect
        if cls.train is Engine.train and not pair:
            raise TypeError(f"engine {cls.__name__} must define train, or submit and collect")

    def train(self, jobs: Sequence[Job]) -> list[Reply]:
        """Train every hop and return the replies in the order of the jobs."""
        self.submit(jobs)
        replies: dict[tuple[str, HopId], Reply] = {}
        wanted = [(task.run, hop.id) for task, hop in jobs]
        while not replies.keys() >= set(wanted):
            replies.update({(reply.run, reply.hop): reply for reply in self.collect()})
        return [replies[name] for name in wanted]

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue hops. Engines that train in this process start in `collect`, so that several runs share a launch."""
        self._submitted += jobs

    def collect(self, timeout: float | None = None) -> list[Reply]:
        """Wait until there is at least one reply, and return all that there are; raise an error if none is owed.

        After `timeout` seconds return what there is, which may be nothing. An engine that trains in this process
        returns all replies at once, however long it takes.
        """
        if not self._submitted:
            raise RuntimeError("nothing to collect: no hop was submitted")
        jobs, self._submitted = self._submitted, []
        return self.train(jobs)

    def kernels(self, task: Task) -> str:
        """Return a description of what computes a task's steps."""
        return "PyTorch"

    def forget(self) -> None:
        """Drop the hops that were submitted: nobody waits for their replies."""
        self._submitted = []

    def release(self) -> None:
        """Free memory that was kept for the next call."""
