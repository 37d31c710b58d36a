"""The commands of `tf-basis`.

Each module has HELP, add_arguments(parser) and run(arguments) -> exit status, and
imports what is heavy, TensorFlow above all, in `run` only: help comes at once.
"""


class CommandError(Exception):
    """What a command cannot do; the message is all that its user sees."""

    status = 1


class UsageError(CommandError):
    """Options that do not go together, or of a wrong value."""

    status = 2
