"""Copy batches to a device in the background: pinned memory, a side stream, events.

Three threads take part:

* a worker collates the batch into pinned memory (`Transfer.pin`);
* the transfer thread starts the copies on the side stream of the device and records an event after
  them (`Transfer.send`);
* the training loop's thread makes its current stream wait for that event (`Transfer.receive`).

Without worker threads, the calling thread does all three. If workers live in child processes, a
batch is collated into memory that both processes share. That memory is registered as pinned memory
(`Transfer.register`), and the transfer thread pins what is elsewhere.

Why no kernel reads wrong values:

* A kernel of the training loop runs after the copies of its batch: its stream waits for the event,
  and the event is recorded after the copies, on their stream.
* A later copy does not overwrite a tensor that a kernel of the training loop has yet to read. The
  tensor's memory belongs to the side stream, so torch's allocator may hand it to the next copy as
  soon as Python has released the tensor. `record_stream` makes the allocator wait until the loop's
  stream is past the kernels that were queued when the tensor was released.
* A later batch is not collated into pinned memory that is still being copied. Pinned memory comes
  from torch's caching host allocator: each `non_blocking` copy records an event for its block, and
  a block that Python has released is reused once all its events have completed. So nothing here has
  to hold a pinned tensor after its copy was started, or to know who else refers to it.
* A child does not collate a later batch into registered memory that is still being copied. That
  memory is not torch's, so here `hold` keeps it until the event after the copies has completed. The
  event is asked for when the next batch of any loader is sent or received, so that no thread waits
  for it. Until then the side stream keeps it, because a loader may end before its copies.
* The training loop never has registered memory: torch would not know of its copies.

Receiving never waits for the device. Sending waits if the training loop has queued several steps
that the device has yet to run: otherwise copies would pile up, and the device memory they need.
"""

from ._copies import Transfer, transfer
from ._device import device_of

__all__ = ["Transfer", "device_of", "transfer"]
