"""FedGen's method: what the clients minimize, and what the server does with their models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedcat.core.errors import SettingError
from fedcat.core.options import check_bounds
from fedcat.core.rng import Purpose, random_stream, torch_seed
from fedcat.methods.base import Context, run_server_work
from fedcat.methods.fedavg import FedAvg
from fedcat.methods.fedgen.generator import Generator
from fedcat.methods.fedgen.training import GeneratorState, GeneratorTraining, TrainingOptions
from fedcat.methods.label_counts import LabelCounts, LabelReport
from fedcat.methods.rounds import ends
from fedcat.models.layout import BoundNet, Tensors
from fedcat.models.losses import cross_entropy
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import Batch, LossInputs
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import Task

MOST = 10**6
"""The largest width, number of random inputs, batch and number of steps."""
FLOOR = 1e-4
"""The weights of the clients' two extra terms do not decay below this."""


@dataclass(frozen=True)
class GeneratorRule(LabelReport):
    """The client's loss has two more terms whenever a generator was sent.

    The teacher loss a * CE(head(G(y')), y') is on features generated for random labels y', as many as the batch has
    samples. The latent loss b * KL(p(head(G(y))) || p(x)) is on features generated for the batch's own labels; its
    first argument is detached. The generator normalizes by its running statistics.
    """

    generator: Generator
    a: float
    b: float
    decay: float
    local_steps: int

    def draw(self, rng: np.random.Generator, task: Task, hop: Hop, steps: int) -> dict[str, Tensor]:
        """Draw labels and noise; the terms' weights in this round come along, one per step."""
        if "generator" not in hop.sent:
            return {}
        dtype, length = task.layout.dtype, max(2, task.batch_size + 1)  # with a lone sample that joins a full batch
        labels = rng.integers(self.generator.classes, size=(steps, length))
        noise, own_noise = (
            rng.random((steps, length, self.generator.noise), dtype=np.float32) for _ in ("teacher", "latent")
        )
        active = np.arange(steps) < (self.local_steps or steps)
        a, b = (weight and max(FLOOR, weight * self.decay**hop.round) for weight in (self.a, self.b))
        return {
            "labels": torch.from_numpy(labels),
            "noise": torch.from_numpy(noise).to(dtype),
            "own_noise": torch.from_numpy(own_noise).to(dtype),
            "a": torch.from_numpy(active * float(a)).to(dtype),
            "b": torch.from_numpy(active * float(b)).to(dtype),
        }

    def loss(self, net: BoundNet, batch: Batch, inputs: LossInputs) -> Tensor:
        """Return the loss on the batch, plus the teacher loss and the latent loss once there is a generator."""
        logits = net.logits(batch.x)
        loss = batch.mean(batch.losses(logits))
        if "generator" not in inputs.sent:
            return loss
        row, drawn, generator = inputs.sent["generator"], inputs.drawn, self.generator
        size = len(batch.y)
        labels, noise, own_noise = (drawn[name][:size] for name in ("labels", "noise", "own_noise"))
        given = generator.inputs(torch.cat([noise, own_noise]), torch.cat([labels, batch.y]))
        features = generator.generate(row, given)
        # both terms at once, unless the head may normalize a batch
        made, own = map(net.head, features.chunk(2)) if net.buffers else net.head(features).chunk(2)
        teacher = batch.mean(cross_entropy(made, labels))
        target = functional.log_softmax(own.detach(), -1)
        divergence = (target.exp() * (target - functional.log_softmax(logits, -1))).sum(-1)
        return loss + drawn["a"] * teacher + drawn["b"] * batch.mean(divergence)


class FedGen(FedAvg):
    """FedAvg with a generator that distils the knowledge of the clients' last layers.

    After each round the generator is trained to make features that the heads of the clients' models classify as the
    wanted labels; from the second round on it is sent along, and clients learn from it besides their own data.

    Parameters
    ----------
    context : Context
        See there.
    a, b : float
        Weights of the teacher loss and of the latent loss in the clients' loss.
    decay : float
        The factor by which a and b shrink each round.
    local_steps : int
        Local steps after which both terms end; 0 for never.
    hidden, noise : int
        The generator's width, and the number of its random inputs.
    generator_batch, generator_steps : int
        Generated samples per batch on the server, and its steps per round. A client generates as many as its batch
        holds.
    generator_lr, generator_lr_decay, generator_weight_decay : float
        Of the generator's Adam; the learning rate is multiplied by the decay each round.
    teacher, diversity : float
        Weights of the teacher loss and of the diversity loss in the generator's loss.
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
        for name, count in {"hidden": hidden, "noise": noise}.items():
            check_bounds(name, count, at_least=1, at_most=MOST)
        check_bounds("generator_batch", generator_batch, at_least=2, at_most=MOST)
        for name, weight in {"a": a, "b": b, "teacher": teacher, "diversity": diversity}.items():
            check_bounds(name, weight, at_least=0)
        for name, count in {"local_steps": local_steps, "generator_steps": generator_steps}.items():
            check_bounds(name, count, at_least=0, at_most=MOST)
        check_bounds("generator_lr", generator_lr, at_least=0)
        check_bounds("generator_weight_decay", generator_weight_decay, at_least=0)
        check_bounds("decay", decay, at_least=0, at_most=1)
        check_bounds("generator_lr_decay", generator_lr_decay, at_least=0, at_most=1)
        if not context.classes:
            raise SettingError("method fedgen needs class labels: the targets of this data are values")
        generator = Generator(noise, context.classes, hidden, _latent(context))
        self.training = TrainingOptions(generator_batch, generator_steps, generator_weight_decay, teacher, diversity)
        self.rule = GeneratorRule(generator, a, b, decay, local_steps)
        self.lr, self.lr_decay = generator_lr, generator_lr_decay
        self.labels = LabelCounts(context)
        self._work: GeneratorTraining | None = None
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(torch_seed(random_stream(context.seed, Purpose.SERVER, client=1)))
            self.generator = GeneratorState(generator, generator.initial().to(context.start))

    def hop(self, round: int, slot: int, client: int, visit: int) -> Hop:
        """Send the generator along once it has been trained."""
        plain = replace(super().hop(round, slot, client, visit), memory=self.labels.memory(client))
        return replace(plain, sent={"generator": self.generator.row}) if self.generator.steps else plain

    def uploads(self, hop: Hop) -> Tensors:
        """Return label counts, which a client reports once."""
        return self.labels.uploads(hop.client)

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> Tensor:
        """Average the rows; the generator will be trained against their heads."""
        for hop, reply in zip(hops, replies, strict=True):
            self.labels.add(hop.client, reply.uploads)
        counts = torch.stack([self.labels[hop.client] for hop in hops]).double()
        shares = (counts / counts.sum(0).clamp(min=1)).to(self.row)
        round, context = hops[0].round, self.context
        self._work = GeneratorTraining(
            target=self.generator,
            options=self.training,
            lr=self.lr * self.lr_decay**round,
            layout=context.layout,
            rows=ends(replies),
            shares=shares,
            seed=context.seed,
            round=round,
            exact=context.exact,
        )
        return super().reduce(hops, replies)

    def work(self) -> GeneratorTraining | None:
        """Hand out the generator's training of the last round, once; the caller must run it."""
        work, self._work = self._work, None
        return work

    def state(self) -> dict[str, Any]:
        """Return also the generator, its optimizer and the label counts that clients have reported."""
        run_server_work([self.work()])
        return {**super().state(), "generator": self.generator.state(), "labels": self.labels.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        super().restore(state)
        self._work = None
        self.generator.restore(state["generator"])
        self.labels.restore(state["labels"])


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
                f"net {type(layout.net).__name__} must compute its output as self.head(self.features(x)), so that a "
                "generator can make the head's inputs"
            )
    if features.dim() != 2:
        raise SettingError(
            f"net must have one-dimensional features for a generator to make, got shape {tuple(features.shape[1:])}"
        )
    return features.shape[1]
