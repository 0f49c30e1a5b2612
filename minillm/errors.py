"""The one kind of error that is the user's to mend."""


class InputError(ValueError):
    """Something that came from outside (a file, a flag, a prompt) is wrong.

    The message is one line that names the thing, the value it had and what would be right.
    The command line prints it and exits with 2; everything else is a bug and keeps its traceback.
    """


def whole_number(name: str, value: object, least: int, most: int | None = None) -> int:
    """The value, if it is an int of at least, and at most, that much. Raises InputError."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= (value if most is None else most):
        right = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} is {value!r}; it must be a whole number {right}")
    return value


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Raises InputError unless the value, which NaN is not, lies there; `name` is the field of an option."""
    if not least <= value <= most:
        raise InputError(f"{name.replace('_', '-')} is {value}; it must be from {least} to {most}")


class WeightsError(InputError):
    """A checkpoint folder cannot be loaded as it is; the message starts with the path."""
