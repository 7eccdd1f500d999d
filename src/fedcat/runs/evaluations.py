"""What of a run is evaluated: which models, on which data, and what that costs its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedcat.data.federation import EvaluationSet
from fedcat.engines.evaluation import Evaluation, Scores, evaluate
from fedcat.methods.base import Method
from fedcat.models.metrics import ClientScores

if TYPE_CHECKING:
    from fedcat.runs.run import Run

HELD_OUT = ("validation", "client_test")
"""The clients' own data that the global model is evaluated on."""


def evaluation(run: Run, row: Tensor, on: EvaluationSet, per_client: bool = False) -> Evaluation:
    """Return the job that evaluates a row on some samples."""
    layout, engine = run.task.layout, run.engine
    together = engine.name == "stacked" and not engine.exact
    return Evaluation(layout, row, on.to(layout.device), list(run.metrics.values()), per_client, together)


def evaluations(run: Run) -> dict[tuple[str, str], Evaluation]:
    """Return the jobs that evaluate a round, by data and model."""
    rows = run.method.models(*run.settings.evaluate)
    found = {("test", model): evaluation(run, row, run.federation.test_set) for model, row in rows.items()}
    for name in HELD_OUT:
        held = getattr(run.federation, name)
        if held is not None:
            found[name, "global"] = evaluation(run, rows["global"], held, per_client=True)
    return found


def score(run: Run) -> Scores:
    """Return the global model's metrics on the test data."""
    (found,) = evaluate([evaluation(run, run.method.models()["global"], run.federation.test_set)])
    assert isinstance(found, dict)
    return found


def client_scores(run: Run) -> ClientScores:
    """Return the global model's metrics on each client's own data: its test data if it has any, else training."""
    held = run.federation.client_test or run.federation.train_set
    (found,) = evaluate([evaluation(run, run.method.models()["global"], held, per_client=True)])
    assert isinstance(found, ClientScores)
    return found


def final_clients(run: Run) -> list[dict[str, Any]]:
    """Return the final model's metrics on each client's own data, and count what it takes to get them."""
    found, names = client_scores(run), run.federation.client_names
    trained = run.federation.client_test is None
    if trained:  # the clients' test data was evaluated after the last round, and counted then
        run.ledger.evaluation += sum(_bytes(run, found))
    about = {"data": "training" if trained else "test"}
    return [{**row, **about, **({"name": names[row["client"]]} if names else {})} for row in found.rows()]


def count_evaluation(run: Run, name: str, found: ClientScores) -> None:
    """Count what an evaluation on clients takes: the model down, and one number per metric and the samples up.

    If it steers the method, that is training traffic.
    """
    down, up = _bytes(run, found)
    if name == "validation" and type(run.method).validated is not Method.validated:
        run.ledger.down += down
        run.ledger.up += up
        run.method.validated(found)
    else:
        run.ledger.evaluation += down + up


def _bytes(run: Run, found: ClientScores) -> tuple[int, int]:
    row = run.method.models()["global"]
    return len(found.clients) * row.nbytes, len(found.clients) * 8 * (len(run.metrics) + 1)
