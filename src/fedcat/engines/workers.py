"""Training in several single-threaded processes: on a CPU, two are faster than one process with two threads."""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.core.interrupt import SIGNALS
from fedcat.engines.base import Engine, Job
from fedcat.engines.batch_order import steps_of
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import Task

PATIENCE = 5.0
"""Seconds after which an idle worker checks whether its parent is still running."""

STEP = 5
"""Fixed cost of a stack's step, in rows: for the digits net 3 with hand-written gradients, 8 with `torch.vmap`."""


def can_fork() -> bool:
    """Return whether worker processes can be forked: on Linux, if no GPU is available.

    A daemonic process, such as one of a `multiprocessing.Pool`, may not have children.
    """
    daemon = multiprocessing.current_process().daemon
    return sys.platform == "linux" and not daemon and not torch.cuda.is_available()


class WorkersEngine(Engine):
    """Divides hops among processes, each of which trains its share with another engine.

    The processes are forked when the first hops arrive, so that they have the data and the nets without copying them;
    only hops and replies are sent between processes. If the inner engine is exact, the process that trains a hop does
    not affect its bits.

    Parameters
    ----------
    inner : Engine
        The engine that trains a process's share of the hops.
    count : int
        The number of processes.
    """

    def __init__(self, inner: Engine, count: int) -> None:
        super().__init__(inner.exact, inner.precision, inner.memory)
        self.inner, self.count, self.name = inner, count, inner.name
        self._tasks: dict[str, Task] = {}
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def train(self, jobs: Sequence[Job]) -> list[Reply]:
        """Train the hops and return the replies in the order of the jobs."""
        if not jobs:
            return []
        self._know([task for task, _ in jobs])
        steps = [steps_of(task, hop) for task, hop in jobs]
        shares = (divide_stacks if self.name == "stacked" else divide)(steps, self.count)
        busy = [(worker, share) for worker, share in zip(self._workers, shares, strict=True) if share]
        replies: dict[int, Reply] = {}
        failed = None
        try:
            for (process, pipe), share in busy:
                _ask(process, pipe, [(jobs[i][0].run, jobs[i][1]) for i in share])
            for (process, pipe), share in busy:
                answer = _answer(process, pipe)
                if isinstance(answer, Exception):
                    failed = answer
                else:
                    replies.update(zip(share, answer, strict=True))
        except BaseException:  # an unread answer must not be mistaken for the next one
            self.release()
            raise
        if failed is not None:
            raise failed
        return [replies[i] for i in range(len(jobs))]

    def kernels(self, task: Task) -> str:
        """Return a description of what computes a task's steps."""
        return f"{self.inner.kernels(task)}, {self.count} processes"

    def release(self) -> None:
        """Stop the processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()
        self._tasks.clear()

    def _know(self, tasks: Sequence[Task]) -> None:
        """Make sure that the processes run and know all these tasks."""
        fresh = {task.run: task for task in tasks if self._tasks.get(task.run) is not task}
        if not fresh and self._workers:
            return
        known = {**self._tasks, **fresh}
        self.release()
        self._tasks = known
        context = multiprocessing.get_context("fork")
        for _ in range(self.count):
            ours, theirs = context.Pipe()
            others = [pipe for _, pipe in self._workers]
            process = context.Process(target=_serve, args=(theirs, [ours, *others], self.inner, known), daemon=True)
            try:
                process.start()
            except OSError as error:
                self.release()
                raise RuntimeError(f"cannot start {self.count} processes ({error}): use fewer --workers") from error
            theirs.close()
            self._workers.append((process, ours))


def divide(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divide positions into shares of about equal cost: the most expensive first, each to the cheapest share."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for position in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = sums.index(min(sums))
        shares[least].append(position)
        sums[least] += costs[position]
    return shares


def divide_stacks(steps: Sequence[int], parts: int) -> list[list[int]]:
    """Divide rows into stacks of similar length: a stack takes as many steps as its longest row.

    A step costs `STEP` plus the number of its rows. Sorted by their number of steps, the rows are cut into consecutive
    shares so that the most expensive share is as cheap as possible.
    """
    order = sorted(range(len(steps)), key=lambda i: -steps[i])

    def shares(limit: int) -> list[list[int]]:
        found: list[list[int]] = []
        cost = limit + 1
        for position in order:
            cost += steps[position]
            if cost > limit:
                found.append([])
                cost = (STEP + 1) * steps[position]
            found[-1].append(position)
        return found

    low, high = 0, (STEP + len(steps)) * max(steps)
    while low < high:
        middle = (low + high) // 2
        fits = (STEP + 1) * max(steps) <= middle and len(shares(middle)) <= parts
        low, high = (low, middle) if fits else (middle + 1, high)
    found = shares(high)
    return found + [[] for _ in range(parts - len(found))]


def _ask(process: BaseProcess, pipe: Connection, asked: list[tuple[str, Hop]]) -> None:
    message = _packed(asked)
    try:
        pipe.send_bytes(message)
    except ConnectionError as error:
        raise _gone(process) from error


def _answer(process: BaseProcess, pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError) as error:
        raise _gone(process) from error


def _gone(process: BaseProcess) -> RuntimeError:
    process.join(1)
    short = " (killed, perhaps for lack of memory: --workers 1 takes less)" if process.exitcode == -9 else ""
    return RuntimeError(f"a worker process ended unexpectedly, exit code {process.exitcode}{short}")


def _serve(pipe: Connection, others: Sequence[Connection], engine: Engine, tasks: dict[str, Task]) -> None:
    """Train the requested hops until the parent process ends; signals are for the parent, which ends its round."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for other in others:
        other.close()
    torch.set_num_threads(1)
    _keep_memory()
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            if not pipe.poll(PATIENCE):
                continue
            asked: list[tuple[str, Hop]] = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            answer = _packed(engine.train([(tasks[run], hop) for run, hop in asked]))
        except Exception as error:
            answer = _packed(_portable(error))
        try:
            pipe.send_bytes(answer)
        except OSError:  # the parent was killed
            break


def _keep_memory() -> None:
    """Make malloc keep freed memory: every step allocates the same again, and new pages are expensive."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in ((-1, 2**31 - 1), (-3, 2**30)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of glibc
            library.mallopt(option, value)


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled, if possible with the worker's traceback."""
    error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Pickler(pickle.Pickler):
    """Pickles tensors as NumPy arrays, each tensor once."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16:  # NumPy has no bfloat16
            return _from_bits, (value.detach().contiguous().view(torch.int16).numpy(),)
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.detach().numpy(),)
        return NotImplemented


def _from_bits(bits: NDArray[np.int16]) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)


def _packed(value: Any) -> memoryview:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getbuffer()
