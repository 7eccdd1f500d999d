"""FedAvg with another default server optimizer: FedAvgM (Hsu et al. 2019) and FedAdam (Reddi et al. 2021)."""

from __future__ import annotations

from fedcat.methods.fedavg import FedAvg


class FedAvgM(FedAvg):
    """FedAvg with momentum on the server; see `fedcat.methods.server_optimizer.Momentum`."""

    default_server_optimizer = "momentum"


class FedAdam(FedAvg):
    """FedAvg with Adam on the server; see `fedcat.methods.server_optimizer.Adam`."""

    default_server_optimizer = "adam"
