"""A variable of Keras 3 that looks at what a checkpoint has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


class CheckedVariable(keras.Variable):
    """Calls a check before TensorFlow restores it from a checkpoint.

    Attributes:
      check: called with the saved value; may raise.
    """

    check: Callable[[Any], None]

    def _restore_from_tensors(self, restored_tensors: dict) -> Any:
        self.check(*restored_tensors.values())
        return super()._restore_from_tensors(restored_tensors)
