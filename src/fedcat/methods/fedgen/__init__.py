"""FedGen (Zhu et al. 2021): a generator of features, trained on the server, teaches the clients."""

from fedcat.methods.fedgen.fedgen import FedGen

__all__ = ["FedGen"]
