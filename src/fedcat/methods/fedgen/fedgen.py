"""FedGen (Zhu et al. 2021): a generator of features, trained on the server, teaches the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedcat.core.errors import SettingError, need
from fedcat.core.rng import Purpose, chance, torch_seed
from fedcat.methods.base import Context, do_together
from fedcat.methods.client_memory import DeviceMemory
from fedcat.methods.fedavg import FedAvg
from fedcat.methods.fedgen.generator import GeneratorForm
from fedcat.methods.fedgen.training import Lesson, Pupil, Training
from fedcat.models.layout import Bound
from fedcat.protocol.hop import Hop, Reply, Tensors
from fedcat.protocol.local_rule import Batch, Beside, LocalRule, Task

FLOOR = 1e-4
"""The weights of the devices' two terms do not decay below this."""


@dataclass(frozen=True)
class Guided(LocalRule):
    """The device's loss has two more terms wherever a generator was sent.

    a * CE(head(G(y')), y') * (generated / batch size) for random labels y', and b * KL(p(head(G(y))) || p(x)) for the
    batch's own labels, its first argument detached. The generator normalises by its running statistics.
    """

    form: GeneratorForm
    a: float
    b: float
    decay: float
    generated: int
    local_steps: int

    def draw(self, rng: np.random.Generator, task: Task, hop: Hop, steps: int) -> dict[str, Tensor]:
        """Draw labels and noise; the terms' weights of this round come along, one a step."""
        if "generator" not in hop.sent:
            return {}
        dtype, size = task.layout.dtype, self.form.noise
        labels = rng.integers(self.form.classes, size=(steps, self.generated))
        noise = rng.random((steps, self.generated, size), dtype=np.float32)
        own_noise = rng.random((steps, max(2, task.batch_size + 1), size), dtype=np.float32)
        on = np.arange(steps) < (self.local_steps or steps)
        a, b = (weight and max(FLOOR, weight * self.decay**hop.round) for weight in (self.a, self.b))
        return {
            "labels": torch.from_numpy(labels),
            "noise": torch.from_numpy(noise).to(dtype),
            "own_noise": torch.from_numpy(own_noise).to(dtype),
            "a": torch.from_numpy(on * (a * self.generated / task.batch_size)).to(dtype),
            "b": torch.from_numpy(on * float(b)).to(dtype),
        }

    def loss(self, net: Bound, batch: Batch, beside: Beside) -> Tensor:
        """Return the cross entropy and the two terms."""
        logits = net.logits(batch.x)
        plain = batch.mean(functional.cross_entropy(logits, batch.y, reduction="none"))
        if "generator" not in beside.sent:
            return plain
        row, drawn = beside.sent["generator"], beside.drawn
        made = self.form.evaluated(row, self.form.inputs(drawn["noise"], drawn["labels"]))
        taught = functional.cross_entropy(net.head(made), drawn["labels"])
        guide = self.form.evaluated(row, self.form.inputs(drawn["own_noise"][: len(batch.y)], batch.y))
        target = functional.log_softmax(net.head(guide), -1).detach()
        apart = (target.exp() * (target - functional.log_softmax(logits, -1))).sum(-1)
        return plain + drawn["a"] * taught + drawn["b"] * batch.mean(apart)

    def finish(
        self, start: Tensor, end: Tensor, steps: Tensor, lr: Tensor, momentum: Tensor, sent: Tensors, memory: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Remember that the label counts have been told."""
        return {}, {"told": torch.ones_like(memory["told"])}

    def report(self, task: Task, hop: Hop) -> dict[str, Tensor]:
        """Upload the label counts, once."""
        if bool(hop.memory["told"]):
            return {}
        return {"labels": torch.from_numpy(task.federation.class_counts[hop.device])}


class FedGen(FedAvg):
    """FedAvg with a generator that distils what the devices' last layers know.

    After each round the generator learns to make features that the devices' models, as they came back, take for the
    wanted labels; from the second round on it is sent along, and devices learn from it beside their own data.

    Parameters
    ----------
    context : Context
        See there.
    a, b : float
        Weights of the two terms of the devices' loss, on generated features and towards the generator's predictions.
    decay : float
        What a and b are multiplied with each round.
    local_steps : int
        Local steps after which both terms end; 0 for none.
    hidden, noise : int
        The generator's width, and how many random numbers it takes.
    generator_batch, generator_steps : int
        Generated samples in a batch, on the server and on devices, and the server's steps a round.
    generator_lr, generator_lr_decay, generator_weight_decay : float
        Of its Adam; the step size is multiplied with the decay each round.
    teacher, diversity : float
        Weights of the two terms of the generator's loss.
    """

    def __init__(
        self,
        context: Context,
        *,
        a: float = 1.0,
        b: float = 1.0,
        decay: float = 0.98,
        local_steps: int = 0,
        hidden: int = 256,
        noise: int = 32,
        generator_batch: int = 32,
        generator_steps: int = 50,
        generator_lr: float = 3e-4,
        generator_lr_decay: float = 0.98,
        generator_weight_decay: float = 1e-2,
        teacher: float = 1.0,
        diversity: float = 1.0,
    ) -> None:
        super().__init__(context)
        for name, number in {"hidden": hidden, "noise": noise}.items():
            need(name, number, 1)
        need("generator_batch", generator_batch, 2)
        for name, weight in {"a": a, "b": b, "teacher": teacher, "diversity": diversity}.items():
            need(name, weight, 0)
        for name, count in {"local_steps": local_steps, "generator_steps": generator_steps}.items():
            need(name, count, 0)
        need("generator_lr", generator_lr, 0)
        need("generator_weight_decay", generator_weight_decay, 0)
        need("decay", decay, 0, 1)
        need("generator_lr_decay", generator_lr_decay, 0, 1)
        self.form = GeneratorForm(noise, context.classes, hidden, _latent(context))
        self.training = Training(generator_batch, generator_steps, generator_weight_decay, teacher, diversity)
        self.rule = Guided(self.form, a, b, decay, generator_batch, local_steps)
        self.lr, self.lr_decay = generator_lr, generator_lr_decay
        self.memory: DeviceMemory = DeviceMemory({"told": context.start.new_zeros(())})
        self.labels: dict[int, Tensor] = {}
        self.lesson: Lesson | None = None
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(torch_seed(chance(context.seed, Purpose.SERVER, device=1)))
            self.generator = Pupil(self.form, self.form.initial().to(context.start))

    def hop(self, round: int, slot: int, device: int, visit: int) -> Hop:
        """Send the generator along, once it has learnt something."""
        plain = super().hop(round, slot, device, visit)
        return replace(plain, sent={"generator": self.generator.row}) if self.generator.steps else plain

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> None:
        """Average the rows that arrived; they are also the generator's next lesson."""
        super().reduce(hops, replies)
        arrived = [(hop, reply) for hop, reply in zip(hops, replies, strict=True) if reply.end is not None]
        self.labels.update({hop.device: r.uploads["labels"] for hop, r in arrived if "labels" in r.uploads})
        if arrived:
            counts = torch.stack([self.labels[hop.device] for hop, _ in arrived]).double()
            shares = (counts / counts.sum(0).clamp(min=1)).to(self.row)
            rows = torch.stack([reply.end for _, reply in arrived if reply.end is not None])
            round, context = hops[0].round, self.context
            lr = self.lr * self.lr_decay**round
            self.lesson = Lesson(
                self.generator, self.training, lr, context.layout, rows, shares, context.seed, round, context.exact
            )

    def work(self) -> Lesson | None:
        """Return the lesson that the generator has not had yet, once: whoever asks for it gives it."""
        lesson, self.lesson = self.lesson, None
        return lesson

    def state(self) -> dict[str, Any]:
        """Return also the generator, its optimiser and what the devices have told."""
        do_together([self.work()])
        labels = {str(device): counts for device, counts in self.labels.items()}
        return {**super().state(), "generator": self.generator.state(), "labels": labels}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        super().restore(state)
        self.generator.restore(state["generator"])
        self.labels = {int(device): counts for device, counts in state["labels"].items()}


def _latent(context: Context) -> int:
    """Return how many features the net's last layer takes."""
    if context.blank is None:
        raise ValueError("the context must hold a blank input, from which the number of features is read")
    layout = context.layout
    size = layout.parameter_size
    layout.net.eval()
    with torch.no_grad():
        net = layout.bind(layout.parameter_views(context.start[:size]), layout.buffer_views(context.start[size:]))
        features = net.features(context.blank)
        if not torch.allclose(net.head(features), net.logits(context.blank), rtol=1e-3, atol=1e-5):
            raise SettingError(
                f"net {type(layout.net).__name__} must give its output as self.head(self.features(x)), for a generator "
                "to make what its head takes, and does not"
            )
    if features.dim() != 2:
        raise SettingError(
            f"net must have features of one dimension for a generator to make, got shape {tuple(features.shape[1:])}"
        )
    return features.shape[1]
