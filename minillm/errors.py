"""The one kind of error that is the user's to mend."""


class InputError(ValueError):
    """Something that came from outside (a file, a flag, a prompt) is wrong.

    The message is one line that names the thing, the value it had and what would be right.
    The command line prints it and exits with 2; everything else is a bug and keeps its traceback.
    """


def whole_number(name: str, value: object, least: int) -> int:
    """The value, if it is an int of at least that much. Raises InputError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return value


class WeightsError(InputError):
    """A checkpoint folder cannot be loaded as it is; the message starts with the path."""
