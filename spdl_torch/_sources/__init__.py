"""Where batches come from: the calling thread, worker threads, or torch's worker processes."""

from .._engine import warn_caller
from .._plan import plan_of
from .._settings import LoaderSettings
from ._caller import CallerSource
from ._children import ChildrenSource
from ._source import BatchSource, Delivery, not_stop_iteration
from ._threads import ThreadSource
from ._torch_workers import TorchWorkersSource

__all__ = ["BatchSource", "Delivery", "make_source", "not_stop_iteration"]


def make_source(settings: LoaderSettings) -> BatchSource:
    """Return the source that the settings ask for. Its workers start with the first batch."""
    if settings.num_workers == 0:
        return CallerSource(settings)
    if settings.worker_method == "multiprocessing":
        return TorchWorkersSource(settings)
    plan = plan_of(settings)
    if plan.is_fallback:
        warn_caller(str(plan))
    if plan.num_processes == 0:
        return ThreadSource(settings)
    return ChildrenSource(settings, plan.num_processes)
