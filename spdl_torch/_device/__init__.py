"""Batches to a device: pinned, copied on a stream of their own, received without waiting.

Three threads take part, and each does the one thing that is its own:

* whoever collates writes the batch into pinned memory (`Transfer.pin`);
* one thread starts the copies, on the side stream of the device, and records an event behind them
  (`Transfer.send`);
* the training loop's current stream waits for that event (`Transfer.receive`).

What makes this right, in one place:

* A kernel of the training loop never reads a tensor before its copy is done: the loop's stream
  waits for the event, the event is behind the copies.
* A tensor's memory is never given to a later copy while the training loop's kernels may still read
  it. The memory belongs to the side stream, where the next copy would find it as soon as Python has
  let go of the tensor; `record_stream` tells the allocator who else is using it.
* A pinned buffer is not written to before the copy out of it is done: it waits in the ring until
  the event behind the copy has completed.
* Only a buffer whose every reader we know goes back into the ring: one that we have copied from
  ourselves. Any other is left to those who refer to it.
* Receiving never waits for the device. Sending does when the loop is some steps ahead, or else
  copies would pile up, and the memory they need.
"""

from ._copies import Transfer, transfer
from ._device import device_of

__all__ = ["Transfer", "device_of", "transfer"]
