"""Whether the Hub can be reached: asked once, before its clients try again and again for half a minute."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

PATIENCE = 5.0
"""Seconds to wait for a connection."""


@contextmanager
def asking_hub() -> Iterator[None]:
    """Let the Hub's clients answer from their caches at once in the block, where the Hub cannot be reached."""
    from huggingface_hub import constants

    modules: list[Any] = [constants, sys.modules.get("datasets.config")]
    before = [getattr(module, "HF_HUB_OFFLINE", None) for module in modules]
    if before[0] or _reachable(constants.ENDPOINT):
        yield
        return
    try:
        for module in filter(None, modules):
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            if module is not None:
                module.HF_HUB_OFFLINE = value


def _reachable(address: str) -> bool:
    """Return whether somebody listens at an address; where a proxy stands between, that is not asked."""
    parts = urlsplit(address)
    if parts.hostname is None or getproxies():
        return True
    try:
        with socket.create_connection(
            (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)), PATIENCE
        ):
            return True
    except OSError:
        return False
