"""The prompts the benchmark runs: 72 conversations, written for this project.

Batching pays off only when requests differ, so the set differs on purpose:

- in length, from 5 to about 1,450 tokens of content (SmolLM2 tokenizer, without the chat template), most of
  them short: 25 below 40 tokens, 21 below 150, 14 below 500, 8 below 1,000 and 4 above. An id says which:
  `short-`, `medium-`, `long-`, `longer-` or `longest-`, and a number;
- in how much there is to answer, from one word to a long story, so that rows stop at different steps;
- in text: prose, code, tables, numbers, tabs and stray blanks, English, French, German, Spanish, Japanese and
  emoji, because the tokenizer and the incremental decoder meet all of these in real use.

The file is in mixed order and its beginning is a small likeness of the whole, so the first 8, 16, 32 or 64
prompts are a fair sample. None of the first 16 is longer than 1,000 tokens.
"""

import json
from dataclasses import dataclass
from importlib.resources import files

from minillm.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """One conversation that waits for an answer.

    `kind` says what is asked for: question, passage, list, code, chat, story, math, rewrite, translate, table
    or email. `messages` is what a chat template takes: dicts with `role` (an optional system message, then
    user and assistant by turns, the user last) and `content`.
    """

    id: str
    kind: str
    messages: tuple[dict[str, str], ...]


def load(n: int | None = None) -> list[Prompt]:
    """The first `n` prompts in the order of the file; all of them when `n` is None.

    Raises InputError when `n` is below 1 or above the number of prompts in the set.
    """
    text = files("minillm.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    # Not splitlines(): it would also cut at U+2028 and U+0085, which JSON allows inside a string.
    records = [json.loads(line) for line in text.rstrip("\n").split("\n")]
    prompts = [Prompt(r["id"], r["kind"], tuple(r["messages"])) for r in records]
    if n is None:
        return prompts
    if not 1 <= n <= len(prompts):
        raise InputError(f"number of prompts is {n}; it must be between 1 and {len(prompts)}")
    return prompts[:n]
