"""Wrong solutions of the lessons, planted: the checks must catch every one of them, with the intended words."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`code` defines the wrong functions in place of the reference's; `words` are in the message that catches it."""

    name: str
    code: str
    words: str
