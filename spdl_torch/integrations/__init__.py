"""Support for frameworks that create their own data loaders.

Each module imports its framework, so import the one that you need:
`spdl_torch.integrations.accelerate` or `spdl_torch.integrations.transformers`. Lightning and timm
need no such module.
"""
