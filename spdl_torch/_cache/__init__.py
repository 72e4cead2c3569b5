"""`cache=`: what is the same in every epoch is made once.

`_store` keeps bytes by key, in memory or in a directory, for all processes that share them.
`_codec` makes values of them. `_parts` knows how a dataset makes a sample, and which part of that
is the same in every epoch; `_vision` knows it of torchvision's datasets. `_sample_cache` puts the
cache before the hooks of a dataset, so the rest of the package knows nothing of it.
"""

from ._cache import Cache
from ._sample_cache import CacheStats, SampleCache, with_cache
from ._store import CacheDirectoryError

__all__ = ["Cache", "CacheDirectoryError", "CacheStats", "SampleCache", "with_cache"]
