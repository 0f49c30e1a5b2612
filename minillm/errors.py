"""The one kind of error that is the user's to mend."""


class InputError(ValueError):
    """Something that came from outside (a file, a flag, a prompt) is wrong.

    The message is one line that names the thing, the value it had and what would be right.
    The command line prints it and exits with 2; everything else is a bug and keeps its traceback.
    """


class WeightsError(InputError):
    """A checkpoint folder cannot be loaded as it is; the message starts with the path."""
