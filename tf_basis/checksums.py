"""SHA-256 of what arrays and manifests hold."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np


def of_array(value: np.ndarray, about: str = "") -> str:
    """SHA-256, in hex, of `about` in UTF-8 and the bytes of an array in C order.

    Manifests of exports hold it: what is hashed never changes.

    Args:
      value: of any shape and type of numbers, such as bfloat16.
      about: what else is to be told apart, such as shape and type, which the bytes do
        not say. Default: nothing.

    Example:

    >>> of_array(np.float32([[1.0]]).T) == of_array(np.float32(1.0))
    True
    """
    result = hashlib.sha256(about.encode())
    result.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    return result.hexdigest()


def of_json(content: Any) -> str:
    """SHA-256, in hex, of the shortest JSON of a manifest, its keys sorted."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
