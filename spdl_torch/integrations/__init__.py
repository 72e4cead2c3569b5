"""What it takes to be used by frameworks that make loaders of their own.

Each module imports its framework, so import the one that you need:
`spdl_torch.integrations.accelerate`, `spdl_torch.integrations.transformers`. Lightning and timm
need nothing of the kind.
"""
