"""Federated learning on skewed data: FedCat and its rivals."""
