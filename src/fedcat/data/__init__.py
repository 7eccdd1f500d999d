"""Who holds which data. Importing this package registers the datasets that come with it."""

from fedcat.data import builtin, user

__all__ = ["builtin", "user"]
