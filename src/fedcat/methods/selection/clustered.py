"""Selection from clusters of clients with similar updates (Fraboni et al. 2021, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.core.errors import SettingError, unknown_name
from fedcat.core.rng import Purpose, random_stream

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Distribution = tuple[Ints, Ints]
"""Clients and their integer weights, which sum to the total number of samples."""

SIMILARITIES = ("cosine", "L1", "L2")
CHUNK = 2**25
"""Float64 values processed at a time."""


FINE = 500
"""Up to this many rows, distances are computed from differences; beyond, from matrix products, which are faster."""
PARTS = 128
"""Parts of a row that a GPU multiplies at the same time."""
MOST = 20_000
"""The largest number of clients; clustering more in every round is refused."""


class ClusteredSelector:
    """Draws one client from each of K distributions over clusters of similar clients.

    Clients are compared by their last updates of the model; a client that has not taken part has a zero update. The
    mean of the K distributions is exactly each client's share of the samples.

    Parameters
    ----------
    seed : int
        The run's seed.
    samples : numpy.ndarray
        The number of samples of each client.
    k : int
        Clients per round.
    similarity : str
        One of `SIMILARITIES`.
    """

    def __init__(self, seed: int, samples: Ints, k: int, similarity: str = "cosine") -> None:
        if similarity not in SIMILARITIES:
            raise unknown_name("similarity", similarity, SIMILARITIES)
        if len(samples) > MOST:
            raise SettingError(
                f"clients must be at most {MOST:,} for clustering by similarity, whose time is cubic in clients, "
                f"got {len(samples):,}"
            )
        self.seed, self.samples, self.k, self.similarity = seed, samples.astype(np.int64), k, similarity
        self._places: dict[int, int] = {}  # of clients among those that took part
        self._changes = torch.zeros(0, 0)  # their updates, with room for more
        self._distances: Floats = np.zeros((0, 0))
        self._sizes: Floats = np.zeros(0)
        self._all = self.samples

    def __len__(self) -> int:
        """Return the number of clients that have taken part."""
        return len(self._places)

    def learn(self, changes: Mapping[int, Tensor]) -> None:
        """Store the clients' updates of the parameters, [P] each, and recompute all distances to them."""
        if not changes:
            return
        updated = [self._places.setdefault(client, len(self._places)) for client in changes]
        rows, count = torch.stack(list(changes.values())), len(self._places)
        self._store(rows, updated)
        found = distances(rows, self._changes[:count], self.similarity)
        sizes = distances(rows, torch.zeros_like(rows[:1]), self.similarity)[:, 0]  # to who has not taken part
        found[np.arange(len(updated)), updated] = 0.0
        found[:, updated] = np.maximum(found[:, updated], found[:, updated].T)
        fresh = count - len(self._sizes)
        if fresh:
            self._distances, self._sizes = np.pad(self._distances, (0, fresh)), np.pad(self._sizes, (0, fresh))
        self._distances[updated, :], self._distances[:, updated] = found, found.T
        self._sizes[updated] = sizes

    def _store(self, rows: Tensor, places: list[int]) -> None:
        """Keep updates at their places; make room for twice as many if there is none."""
        if len(self._places) > len(self._changes):
            room = min(len(self.samples), max(16, 2 * len(self._places)))
            wider = rows.new_zeros(room, rows.shape[1])
            wider[: len(self._changes)] = self._changes if len(self._changes) else 0.0
            self._changes = wider
        self._changes[torch.tensor(places, device=rows.device)] = rows

    def matrix(self) -> Floats:
        """Return the distances between all clients, [N, N]."""
        position = self._positions()
        return self._bordered()[np.ix_(position, position)]

    def _positions(self) -> Ints:
        """Return each client's position among those that took part; all others share the position after the last."""
        position = np.full(len(self.samples), len(self._places))
        position[list(self._places)] = np.arange(len(self._places))
        return position

    def _bordered(self) -> Floats:
        """Return the distances between the clients that took part and, last, one that has not."""
        border = np.zeros((len(self._sizes) + 1,) * 2)
        border[:-1, :-1] = self._distances
        border[:-1, -1] = border[-1, :-1] = self._sizes
        return border

    def tree(self) -> Ints:
        """Return Ward's linkage over the rows of the distance matrix: the two nodes that each merge joins, [N - 1, 2].

        Clients that have not taken part have equal rows and columns; the columns are merged into one weighted column.
        """
        from scipy.cluster.hierarchy import linkage

        count = len(self.samples)
        if count == 1:
            return np.zeros((0, 2), np.int64)
        weights = np.append(np.ones(len(self._places)), np.sqrt(count - len(self._places)))
        rows = torch.from_numpy(self._bordered() * weights)
        mode = "use_mm" if len(rows) > FINE else "donot_use_mm"
        apart = torch.cdist(rows, rows, compute_mode=f"{mode}_for_euclid_dist").numpy()
        position = self._positions()
        condensed = np.concatenate([apart[position[i], position[i + 1 :]] for i in range(count - 1)])
        merged: Ints = linkage(condensed, "ward")[:, :2].astype(np.int64)
        return merged

    def distributions(self, round: int) -> list[Distribution]:
        """Return the K distributions of a round."""
        return fill(self.samples, self.k, self.tree(), random_stream(self.seed, Purpose.GROUP, round))

    def select(self, round: int) -> Ints:
        """Draw one client from each distribution; a client may be drawn more than once."""
        rng = random_stream(self.seed, Purpose.SELECT, round)
        picks = rng.integers(self.samples.sum(), size=self.k)
        chosen = [
            clients[np.searchsorted(np.cumsum(amounts), pick, side="right")]
            for (clients, amounts), pick in zip(self.distributions(round), picks, strict=True)
        ]
        return np.array(chosen, np.int64)

    def exclude(self, clients: Collection[int]) -> None:
        """Let clients count as if they had no samples."""
        self.samples = self._all.copy()
        self.samples[list(clients)] = 0

    def state(self) -> dict[str, Any]:
        """Return the updates of the clients that took part, and their distances."""
        return {
            "clients": list(self._places),
            "changes": list(self._changes[: len(self._places)].clone()),
            "distances": self._distances.copy(),
            "sizes": self._sizes.copy(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self._places = {client: place for place, client in enumerate(state["clients"])}
        self._changes = torch.stack(list(state["changes"])) if state["changes"] else torch.zeros(0, 0)
        self._distances, self._sizes = np.array(state["distances"]), np.array(state["sizes"])


def distances(rows: Tensor, others: Tensor, similarity: str) -> Floats:
    """Return the distances [R, N] between rows [R, P] and other rows [N, P], in float64.

    For ``cosine`` the distance is the angle, which is 0 if either row is zero.
    """
    rows = rows.double()
    parts = []
    step = max(1, CHUNK // rows.shape[1])
    for begin in range(0, len(others), step):
        some = others[begin : begin + step].double()
        if similarity == "L1":
            parts.append(torch.cdist(rows, some, p=1.0))
        elif similarity == "L2":
            parts.append(torch.cdist(rows, some, compute_mode="donot_use_mm_for_euclid_dist"))
        else:
            norms = rows.norm(dim=1)[:, None] * some.norm(dim=1)
            products = products_in_parts(rows, some) if rows.device.type == "cuda" else rows @ some.T
            cosine = torch.where(norms > 0, products / norms, 1.0)
            parts.append(torch.arccos(cosine.clamp(-1.0, 1.0)))
    found: Floats = torch.cat(parts, 1).cpu().numpy()
    return found


def products_in_parts(rows: Tensor, others: Tensor) -> Tensor:
    """Return rows @ others.T, summed over parts of the long dimension: a GPU does them at the same time."""
    whole = rows.shape[1] - rows.shape[1] % PARTS
    a, b = (t[:, :whole].reshape(len(t), PARTS, -1).transpose(0, 1) for t in (rows, others))
    return torch.bmm(a, b.mT).sum(0) + rows[:, whole:] @ others[:, whole:].T


def cut(tree: Ints, weights: Ints, most: int) -> list[Ints]:
    """Return the largest subtrees with total weight at most `most`, as arrays of clients."""
    count = len(weights)
    total = np.concatenate([weights, np.zeros(len(tree), np.int64)])
    for node, (left, right) in enumerate(tree, start=count):
        total[node] = total[left] + total[right]
    clusters = []
    open_nodes = [len(total) - 1]
    while open_nodes:
        node = open_nodes.pop()
        if total[node] > most:
            open_nodes += tree[node - count].tolist()
            continue
        below, leaves = [node], []
        while below:
            one = below.pop()
            if one < count:
                leaves.append(one)
            else:
                below += tree[one - count].tolist()
        clusters.append(np.array(sorted(leaves), np.int64))
    return clusters


def fill(samples: Ints, k: int, tree: Ints, rng: np.random.Generator) -> list[Distribution]:
    """Return K distributions whose mean is each client's share of the samples.

    All amounts are integers: client i has k * samples[i] to distribute, and each distribution takes samples.sum(). A
    client with enough for one or more whole distributions fills those alone. Each of the heaviest clusters then starts
    a distribution; the clients of the other clusters fill them up, and may be split over several.
    """
    total = int(samples.sum())
    alone, rest = np.divmod(k * samples, total)
    done = [(np.array([i]), np.array([total])) for i in np.repeat(np.arange(len(samples)), alone)]
    clusters = cut(tree, rest, total)
    clusters.sort(key=lambda cluster: -rest[cluster].sum())
    begun = clusters[: k - len(done)]
    waiting = [i for cluster in reversed(clusters[k - len(done) :]) for i in rng.permutation(cluster) if rest[i]]
    left = rest.copy()
    for cluster in begun:
        members = [i for i in cluster if rest[i]]
        amounts = [int(rest[i]) for i in members]
        while (room := total - sum(amounts)) > 0:
            part = min(room, int(left[waiting[0]]))
            members.append(waiting[0])
            amounts.append(part)
            left[waiting[0]] -= part
            if not left[waiting[0]]:
                waiting.pop(0)
        done.append((np.array(members), np.array(amounts)))
    return done
