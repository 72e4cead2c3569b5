"""`fuse=True`: a torchvision dataset and its transforms, run as an equivalent that is quicker.

The first transforms, which crop, resize and flip, become arguments of the decoder (`_head`). The
last ones, which convert and normalise, become one operation on the batch (`spdl_torch._deferred`).
`_chain` knows which transforms these are. `_datasets` puts the result into a copy of the dataset,
in the place of its loader and its transform. So the rest of the package knows nothing of it, but
for how to collate a `DeferredImage`.
"""

from ._chain import FusedTransform, flattened, is_exactly
from ._datasets import Fusion, fused, fusions_of, names_used_by_reading
from ._head import FusedLoader

__all__ = [
    "FusedLoader",
    "FusedTransform",
    "Fusion",
    "flattened",
    "fused",
    "fusions_of",
    "is_exactly",
    "names_used_by_reading",
]
