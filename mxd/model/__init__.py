"""Frozen base models: loaded from anywhere after a check of their files, with their MLPs found."""

from mxd.model.frozen import FrozenModel
from mxd.model.loading import BUNDLED, DTYPES, load_frozen, outline, pick_device, wrap

__all__ = ["BUNDLED", "DTYPES", "FrozenModel", "load_frozen", "outline", "pick_device", "wrap"]
