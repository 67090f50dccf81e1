"""Lines for the user of vLLM. All begin with "pqcached:"."""

from __future__ import annotations

import logging
import time
from typing import Dict

_LOGGER = logging.getLogger("vllm.pqcached")  # below vLLM's logger, so that its settings hold
_REPEAT_SECONDS = 60.0
_said: Dict[str, float] = {}


def info(text: str) -> None:
    _LOGGER.info("pqcached: %s", text)


def warn(text: str) -> None:
    """Prints a line, and the same one again only after a minute."""
    now = time.monotonic()
    if now - _said.get(text, -_REPEAT_SECONDS) < _REPEAT_SECONDS:
        return
    if len(_said) > 100:
        _said.clear()
    _said[text] = now
    _LOGGER.warning("pqcached: %s", text)
