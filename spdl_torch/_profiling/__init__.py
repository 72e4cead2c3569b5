"""Profiles of a loader: a timeline of every worker, and how each stage scales."""

from ._profile import CachedLoader, Headroom, Profile, Scaling
from ._run import make_profile

__all__ = ["CachedLoader", "Headroom", "Profile", "Scaling", "make_profile"]
