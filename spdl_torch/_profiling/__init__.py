"""Where the time goes, in words and pictures."""

from ._cached import CachedLoader
from ._log import StatsLog
from ._profile import Headroom, Profile, Scaling, Span

__all__ = ["CachedLoader", "Headroom", "Profile", "Scaling", "Span", "StatsLog"]
