"""A conversation as one string, by the chat template that comes with the checkpoint.

The template is a Jinja2 program from a stranger: it runs in a sandbox, with what transformers gives it. Its
markers (`<|im_start|>`, ...) become special tokens afterwards; the same characters in a message must not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minillm.errors import InputError


class ChatTemplate:
    """The template in a tokenizer_config.json, and the special tokens that no message may spell."""

    def __init__(self, config: dict[str, Any], specials: Collection[str]) -> None:
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        self._source: str | None = source
        self._tokens = {  # bos_token, eos_token, ...: what templates call them
            key: value["content"] if isinstance(value, dict) else value
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, str | dict)
        }
        self._specials = specials
        self._longest = max(map(len, specials), default=0)
        # Looking ahead finds every start, also where two overlap; (?!) finds nothing.
        self._starts = re.compile("(?=" + ("|".join(map(re.escape, specials)) or "(?!)") + ")")

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> tuple[str, dict[int, str]]:
        """The conversation as text in which only the template can have written a special token.

        In the messages, the first character of every special token is swapped for a character that occurs
        nowhere else. So cut the text at special tokens first, then `str.translate` the parts between by the
        second value, which swaps back.

        Raises InputError for malformed messages, without a template, and for whatever the template raises.
        """
        _check(messages)
        if self._source is None:
            raise InputError("this checkpoint has no chat template; give the prompt as plain text")
        used = set(self._source).union(*(text for message in messages for text in message.values()))
        unused = (chr(code) for code in range(0x10FFFD, 0, -1) if chr(code) not in used)
        hide = {first: next(unused) for first in sorted({special[0] for special in self._specials})}
        hidden = [{key: self._hide(text, hide) for key, text in message.items()} for message in messages]
        try:
            text = self._template.render(
                messages=hidden,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except Exception as error:  # a stranger's program can raise anything
            raise InputError(f"the chat template refuses these messages: {error}") from error
        return text, str.maketrans({stand_in: first for first, stand_in in hide.items()})

    def _hide(self, text: str, hide: dict[str, str]) -> str:
        """Swap the first character of each special token in `text`, and of one begun at its end.

        The latter because a template may trim a text and join the next one to it.
        """
        starts = [match.start() for match in self._starts.finditer(text)]
        end = len(text.rstrip())
        for i in range(max(0, end - self._longest), end):
            if any(special.startswith(text[i:end]) for special in self._specials):
                starts.append(i)
        chars = list(text)
        for i in starts:
            chars[i] = hide[text[i]]
        return "".join(chars)

    @cached_property
    def _template(self) -> jinja2.Template:
        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = tojson  # Jinja2's own escapes for HTML
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._source or "")


def check_surrogates(text: str, name: str) -> None:
    """Raise InputError if `text` (called `name`) has a lone surrogate, which no UTF-8 bytes can stand for."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise InputError(f"{name} has a lone surrogate {code} at position {error.start}; remove it") from None


def _check(messages: Sequence[dict[str, str]]) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise InputError(f"messages is {messages!r:.80}; a list of at least one message is needed")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise InputError(f"message {i} is {message!r:.80}; a dict with the keys role and content is needed")
        for key, text in message.items():
            if not isinstance(text, str):
                raise InputError(f"message {i} has {key} {text!r:.80}; a string is needed")
            check_surrogates(text, f"message {i}: {key}")
