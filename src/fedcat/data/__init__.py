"""Datasets, partitions and federations. Importing this package registers the built-in datasets."""

from fedcat.data import builtin, user

__all__ = ["builtin", "user"]
