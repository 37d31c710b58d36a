"""What this process is for."""

from __future__ import annotations

import os
import sys


def is_command() -> bool:
    """Whether it is `tf-basis` or `python -m tf_basis`.

    Such a process imports what its command needs; importing the package imports nothing
    else there, so that help does not wait for TensorFlow.
    """
    started = os.path.basename(sys.argv[0]) if sys.argv else ""
    if started == "-m":  # while Python looks for the module that it is to run
        named = sys.orig_argv[1:]
        place = named.index("-m") if "-m" in named else len(named)
        return named[place + 1 : place + 2] in (["tf_basis"], ["tf_basis.__main__"])
    return started in ("tf-basis", "tf-basis.exe", "tf-basis-script.py")
