"""The benchmark's prompts keep the promises that `minillm.bench.prompts` makes about them."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.bench.prompts import Prompt, load
from minillm.errors import InputError

KINDS = set("question passage list code chat story math rewrite translate table email".split())

# Length class (the first part of an id) -> content tokens, from (inclusive) and to (exclusive).
CLASSES = {
    "short": (5, 40),
    "medium": (40, 150),
    "long": (150, 500),
    "longer": (500, 1000),
    "longest": (1000, 1501),
}


def length_class(prompt: Prompt) -> str:
    return prompt.id.split("-")[0]


def test_the_set_is_large_and_has_no_repeats() -> None:
    prompts = load()
    assert len(prompts) >= 64
    assert len({p.id for p in prompts}) == len(prompts)
    texts = [" ".join(m["content"] for m in p.messages if m["role"] != "system").split() for p in prompts]
    assert len({" ".join(words).lower() for words in texts}) == len(prompts)


def test_every_conversation_is_valid() -> None:
    for prompt in load():
        turns = list(prompt.messages)
        assert all(set(m) == {"role", "content"} and m["content"].strip() for m in turns), prompt.id
        if turns[0]["role"] == "system":
            turns = turns[1:]
        assert len(turns) % 2 == 1, f"{prompt.id}: the last message must be the user's"
        assert [m["role"] for m in turns] == (["user", "assistant"] * len(turns))[: len(turns)], prompt.id
        assert all("<|" not in m["content"] for m in turns), f"{prompt.id}: a special token in the text"


def test_the_kinds_are_the_documented_ones_and_all_occur() -> None:
    assert {p.kind for p in load()} == KINDS


def test_some_prompts_have_a_system_message_several_turns_or_other_scripts() -> None:
    prompts = load()
    assert sum(p.messages[0]["role"] == "system" for p in prompts) >= 3
    assert sum(any(m["role"] == "assistant" for m in p.messages) for p in prompts) >= 3
    text = "".join(m["content"] for p in prompts for m in p.messages)
    for sample in ("é", "ü", "¿", "ñ", "日", "🎉", "\t", "\n\n\n", "```"):
        assert sample in text, f"no prompt contains {sample!r}"


def test_the_beginning_is_a_small_likeness_of_the_whole() -> None:
    first = [length_class(p) for p in load(16)]
    assert Counter(first[:8])["long"] == 1 and set(first[:8]) == {"short", "medium", "long"}
    assert 1 <= Counter(first)["longer"] <= 2 and "longest" not in first
    whole = Counter(length_class(p) for p in load())
    for n in (32, 64):
        part = Counter(length_class(p) for p in load(n))
        for name, count in whole.items():
            assert abs(part[name] - n * count / whole.total()) <= 1.5, (n, name)


@given(st.integers())
def test_load_takes_the_first_n_or_says_what_would_be_right(n: int) -> None:
    everything = load()
    if 1 <= n <= len(everything):
        assert load(n) == everything[:n]
    else:
        with pytest.raises(InputError, match=rf"{n}; it must be between 1 and {len(everything)}"):
            load(n)


def test_the_lengths_are_as_promised(real_weights: Path) -> None:
    from minillm.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(real_weights)
    counts: Counter[str] = Counter()
    for position, prompt in enumerate(load()):
        tokens = sum(len(tokenizer.encode(m["content"])) for m in prompt.messages)
        low, high = CLASSES[length_class(prompt)]
        assert low <= tokens < high, f"{prompt.id} has {tokens} tokens, not {low} to {high - 1}"
        counts[length_class(prompt)] += 1
        if position < 8 and length_class(prompt) == "long":
            assert 300 <= tokens < 500, f"{prompt.id}: {tokens}"
    assert counts == {"short": 25, "medium": 21, "long": 14, "longer": 8, "longest": 4}
