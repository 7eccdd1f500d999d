"""Flower's client, in a separate module so that Flower's actors can import it."""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from work import WORKS, StepCount, make_data, make_net, slices, train


@cache
def data(work: str) -> tuple[Tensor, Tensor]:
    """Return the workload's data, created once per process."""
    return make_data(WORKS[work])


@cache
def net(work: str) -> nn.Module:
    """Return the process's net; every client overwrites its state."""
    return make_net(work)


client = ClientApp()


@client.train()
def fit(message: Message, context: Context) -> Message:
    """Train one client."""
    config = message.content["config"]
    work = WORKS[config["work"]]
    torch.set_num_threads(config["threads"])
    model, (x, y) = net(work.net), data(work.net)
    own = int(context.node_config["partition-id"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    count = StepCount()
    train(model, lambda: slices(x[own], y[own], work.batch), work.epochs)
    metrics = MetricRecord({"num-examples": work.samples, "steps": count.close()})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
