"""The guard: refuses hops of clients whose updates point against those of the other clients, or are far longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedcat.models.layout import Layout
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply
from fedcat.protocol.reply_check import updates

LEAST = 3
"""The number of clients from which on their hops are compared with each other."""
LONG = 10.0
"""How many times the median length of an update is too long. Lengths are divided by the square root of the steps."""


class HopGuard:
    """Judges the hops of a round, or of a stage, against each other.

    An update agrees with the others by the cosine between it and the sum of the other clients' directions. On skewed
    data a single cosine says little: honest updates are nearly orthogonal. So the cosines of a client's hops are added
    up over the rounds, and a hop is refused if its client's sum is below zero. A refused hop counts too, so that a
    client can come back.

    Parameters
    ----------
    layout : Layout
        What a row means; running statistics are not compared.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.agreement: dict[int, float] = {}

    def judged(self, ended: Sequence[tuple[Hop, Reply]]) -> list[tuple[Hop, Reply]]:
        """Return the hops that have ended, in the order of their names; those that are not trusted are refused."""
        known = sorted(ended, key=lambda pair: pair[0].id)
        arrived = [(hop, reply) for hop, reply in known if reply.end is not None]
        if not arrived:
            return known
        change = updates(arrived, self.layout)
        lengths = torch.linalg.vector_norm(change, dim=1)
        directions = change / lengths.clamp(min=torch.finfo(change.dtype).tiny)[:, None]
        products = (directions @ directions.T).double().cpu().numpy()
        pace = lengths.double().cpu().numpy() / np.sqrt([reply.steps for _, reply in arrived])
        clients = np.array([hop.client for hop, _ in arrived])
        enough = len(np.unique(clients)) >= LEAST
        reasons = {}
        for place, (hop, _) in enumerate(arrived):
            if enough:
                cosine = agreement_with_others(products, place, clients)
                self.agreement[hop.client] = self.agreement.get(hop.client, 0.0) + cosine
            if enough and pace[place] > LONG * np.median(pace):
                reasons[hop.id] = f"an update more than {LONG:g} times as long as the others'"
            elif self.agreement.get(hop.client, 0.0) < 0:
                reasons[hop.id] = "the client's updates point against the others'"
        return [(hop, reply.refused(reasons[hop.id]) if hop.id in reasons else reply) for hop, reply in known]

    def state(self) -> dict[str, Any]:
        """Return the sums of the clients' cosines."""
        return {str(client): value for client, value in self.agreement.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore from `state`."""
        self.agreement = {int(client): value for client, value in state.items()}


def agreement_with_others(products: np.ndarray[Any, Any], place: int, clients: np.ndarray[Any, Any]) -> float:
    """Return the cosine between one direction and the sum of the other clients', given inner products [R, R]."""
    others = np.flatnonzero(clients != clients[place])
    length = np.sqrt(max(0.0, products[np.ix_(others, others)].sum()))
    return float(products[place, others].sum() / length) if length > 0 else 0.0
