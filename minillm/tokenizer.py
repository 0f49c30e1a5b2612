"""Text to token ids and back, from a checkpoint's own files (nothing is fetched).

Byte-level BPE (Radford et al. 2019, GPT-2) in three steps: cut the text into pieces by a regular expression,
write each piece as UTF-8 bytes, merge neighbouring bytes in the order in which the merges were learned.
tiktoken does the merging. Ids equal those of the Hugging Face `tokenizers` library with one intended
difference: text handed to `encode` never becomes a special token, not even where it spells one.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import regex
import tiktoken

from minillm.chat_template import ChatTemplate, check_surrogates
from minillm.errors import InputError

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# `Digits` cuts out every digit before GPT-2's rule runs on what lies between. As one pattern: a digit takes
# no space before it, and white space stays whole before a digit. (`Digits` of `tokenizers` 0.23 knows the few
# digits that Unicode 17 added; here they are symbols.)
DIGITS_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"

UNKNOWN = "\ufffd".encode()  # what an id outside the vocabulary decodes to
UNASSIGNED = "\U0010ffff"  # a letter, digit or space in no version of Unicode

# GPT-2's alphabet: a byte that prints is written as itself, the others as the characters from 256 on.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
HIDDEN = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(HIDDEN)}

# Picks from a text the characters that tiktoken's Unicode tables know; id = byte.
ASSIGNED = tiktoken.Encoding(
    "assigned", pat_str=r"\P{Cn}+", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={}
)


class Tokenizer:
    """Byte-level BPE with special tokens and a chat template. `n_vocab` is the highest id + 1."""

    def __init__(self, data: dict[str, Any], config: dict[str, Any]) -> None:
        """`data` and `config` are the parsed tokenizer.json and tokenizer_config.json."""
        model = data["model"]
        if model["type"] != "BPE" or model.get("byte_fallback"):
            kind = "BPE with byte_fallback" if model["type"] == "BPE" else model["type"]
            raise InputError(f"tokenizer model {kind} is not implemented; byte-level BPE is")
        for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(option):
                raise InputError(f"{option} {model[option]!r} is not implemented; a tokenizer without it is")
        if data.get("normalizer") not in (None, {"type": "NFC"}):
            raise InputError(f"normalizer {data['normalizer']} is not implemented; none and NFC are")
        self._nfc = data.get("normalizer") is not None
        self._split = _compile(_split_pattern(data["pre_tokenizer"]))
        self._bos = _bos_ids(data.get("post_processor"))

        added = data.get("added_tokens", [])
        for token in added:
            if any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip")):
                raise InputError(f"added token {token} is not implemented; one without options is")
        self._added: dict[str, int] = {t["content"]: t["id"] for t in added}
        self.special_ids: dict[str, int] = {t["content"]: t["id"] for t in added if t["special"]}
        self._any_added = _any_of(self._added)
        self._any_plain = _any_of(self._added.keys() - self.special_ids.keys())  # one token in any text
        self._special = set(self.special_ids.values())
        self._chat = ChatTemplate(config, self.special_ids)

        vocab: dict[str, int] = model["vocab"]
        self._bytes = {i: _token_bytes(token) for token, i in vocab.items()}
        self._bytes |= {i: text.encode() for text, i in self._added.items()}
        self.n_vocab = max(self._bytes) + 1

        # tiktoken joins the two neighbours that make the lowest id, so ids must rise in merge order.
        ranks = {bytes([byte]): vocab[char] for char, byte in BYTE_OF.items() if char in vocab}
        last = -1
        for merge in model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            made = vocab[left + right]
            if made < last:
                raise InputError(f"merge {left!r} {right!r} makes id {made} after id {last}; ids must rise")
            last = made
            if left + right not in self.special_ids:  # a special token is never text, even if merges spell it
                ranks[_token_bytes(left + right)] = made
        self._bpe = tiktoken.Encoding("bpe", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={})
        self._missing = bytes(byte for byte in range(256) if bytes([byte]) not in ranks)
        if self._missing and model.get("unk_token"):
            raise InputError(f"unk_token {model['unk_token']!r} is not implemented where bytes have no token")
        # `ignore_merges` (Llama 3): a piece that is a token is that token, even if no merges lead to it.
        self._whole = ranks
        if model.get("ignore_merges"):
            self._whole = {_token_bytes(text): i for text, i in vocab.items() if text not in self.special_ids}

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja.

        Raises InputError if a file is absent, malformed, or of a kind that is not implemented (named).
        """
        folder = Path(folder)
        path, config_path, template_path = (
            folder / name for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        )
        if not path.is_file():
            raise InputError(f"{path} does not exist; the folder of a Hugging Face checkpoint has it")
        try:
            config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
            if template_path.is_file():
                config["chat_template"] = template_path.read_text("utf-8")
            return cls(json.loads(path.read_text("utf-8")), config)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{folder}: the tokenizer's files are malformed: {error!r}") from error

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of plain text.

        `bos` puts in front what the checkpoint's post-processor does (SmolLM2: nothing; Llama 3: one BOS).
        Raises InputError with the position for a lone surrogate; any other text is fine.
        """
        check_surrogates(text, "the text")
        return (self._bos if bos else []) + self._encode_parts(text, self._any_plain, {})

    def encode_chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, rendered by the checkpoint's chat template.

        `messages` are dicts of two strings, role and content. The template's markers become special tokens,
        the same characters inside a message never do. Begins with exactly one BOS if the checkpoint uses one,
        whether or not the template writes it.
        Raises InputError for malformed messages, without a template, and if the template raises.
        """
        text, swap_back = self._chat.render(messages, add_generation_prompt)
        ids = self._encode_parts(text, self._any_added, swap_back)
        return ids if ids[: len(self._bos)] == self._bos else self._bos + ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`. What is no UTF-8, and ids outside the vocabulary, become U+FFFD; never raises."""
        shown = (i for i in ids if not (skip_special and i in self._special))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def decoder(self) -> Decoder:
        """A new incremental decoder, for one stream of ids."""
        return Decoder(self)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id, perhaps only part of a character. Outside the vocabulary: those of U+FFFD."""
        return self._bytes.get(token, UNKNOWN)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def _encode_parts(self, text: str, added: re.Pattern[str], swap_back: dict[int, str]) -> list[int]:
        """Cut `text` at `added` tokens; encode what lies between (after `swap_back`) by merging."""
        ids: list[int] = []
        for i, part in enumerate(added.split(text)):
            if i % 2:
                ids.append(self._added[part])
                continue
            for piece in self._pieces(part.translate(swap_back)):
                data = piece.encode()
                if data in self._whole:
                    ids.append(self._whole[data])
                elif known := data.translate(None, self._missing):  # as `tokenizers`: no token, no trace
                    ids += self._bpe._encode_single_piece(known)
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        """Cut `text` by the checkpoint's pattern.

        Not by tiktoken's own regex engine: its lookahead keeps a stack entry per character, so a million
        spaces end in a PanicException, which is not an Exception; and it leaves no chance to drop the bytes
        that have no token before merging, another panic. `regex` has neither fault, but its Unicode tables
        may be newer than those of tiktoken and `tokenizers`: characters these do not know are masked while
        cutting.
        """
        if self._nfc:
            text = _nfc(text)
        shape = text
        if not text.isascii():
            known = bytes(ASSIGNED.encode_ordinary(text)).decode()
            newer = set(regex.findall(r"\P{Cn}", text)).difference(known)
            shape = text.translate({ord(char): UNASSIGNED for char in newer})
        start = 0
        for piece in filter(None, self._split.split(shape)):
            yield text[start : start + len(piece)]
            start += len(piece)


class Decoder:
    """Ids to text as they come, never half a character; special tokens are skipped.

    Python's incremental UTF-8 decoder does the work: it holds bytes that may yet become a character and turns
    those that no longer can into U+FFFD. All deltas joined equal `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that has become certain, perhaps ""."""
        if self._tokenizer.is_special(token):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """The end of the stream: an unfinished character comes out as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def _token_bytes(token: str) -> bytes:
    """The bytes that a token of the vocabulary stands for."""
    if all(char in BYTE_OF for char in token):
        return bytes(BYTE_OF[char] for char in token)
    return token.encode()  # outside GPT-2's alphabet: text as it is, out of reach for merges


def _split_pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """The one regular expression that a tokenizer.json's pre-tokenizer amounts to."""
    steps = [pre_tokenizer]
    if pre_tokenizer and pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    match steps:
        case [*first, {"type": "ByteLevel", "add_prefix_space": False, **rest}]:
            match first, rest.get("use_regex", True):
                case [], True:
                    return GPT2_SPLIT
                case [{"type": "Digits", "individual_digits": True}], True:
                    return DIGITS_SPLIT
                case [{"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", **options}], False:
                    if not options.get("invert"):
                        return split
    raise InputError(
        f"pre_tokenizer {json.dumps(pre_tokenizer)} is not implemented; ByteLevel, single Digits + ByteLevel "
        "and an isolating Split by a Regex + ByteLevel without regex are"
    )


def _compile(pattern: str) -> regex.Pattern[str]:
    """Compile a split pattern written for Oniguruma; the result's `split` gives pieces and gaps in turn."""
    try:
        compiled = regex.compile(f"({pattern})")
    except regex.error as error:
        raise InputError(f"split pattern {pattern!r} is not implemented: {error}") from None
    if compiled.groups > 1 or re.search(r"\\[^\WpPsSrntd]", pattern):
        raise InputError(f"split pattern {pattern!r} has a group or an escape that is not implemented")
    return compiled


def _bos_ids(post_processor: dict[str, Any] | None) -> list[int]:
    """The ids that a post-processor puts in front of a text."""
    match post_processor:
        case None | {"type": "ByteLevel"}:  # this ByteLevel only trims offsets
            return []
        case {"type": "Sequence", "processors": steps}:
            return [i for step in steps for i in _bos_ids(step)]
        case {"type": "TemplateProcessing", "single": [*first, {"Sequence": _}], "special_tokens": tokens}:
            return [i for item in first for i in tokens[item["SpecialToken"]["id"]]["ids"]]
    raise InputError(f"post_processor {json.dumps(post_processor)} is not implemented; tokens in front are")


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches, as a group, any of `texts`, the longest first; (?!) matches nothing."""
    return re.compile("(" + ("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)") + ")")


def _nfc(text: str) -> str:
    """Unicode's composed form in linear time.

    Python orders a run of combining marks by insertion, quadratic in its length, but fast if it is in order.
    """
    runs = groupby(text, key=lambda char: unicodedata.combining(char) != 0)
    ordered = (sorted(run, key=unicodedata.combining) if marks else run for marks, run in runs)
    return unicodedata.normalize("NFC", "".join(char for run in ordered for char in run))
