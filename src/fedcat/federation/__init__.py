"""Who holds which data. Importing this package registers the datasets that come with it."""

from fedcat.federation import own, published

__all__ = ["own", "published"]
