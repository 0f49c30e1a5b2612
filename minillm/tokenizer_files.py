"""Write the tokenizer of a GGUF file as the files that a Hugging Face checkpoint folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minillm.errors import WeightsError

CONTROL = 3  # gguf.TokenType.CONTROL: a token that no text may produce


def write_tokenizer_files(fields: dict[str, Any], folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json` into `folder`.

    `fields` maps GGUF metadata keys ("tokenizer.ggml.tokens", ...) to plain Python values, as
    `{key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}` gives them.

    A GGUF file only names its pre-tokenizer ("smollm") and leaves the rule to the reader. The rule written
    here is the one of the SmolLM2 checkpoints on the Hugging Face Hub: every digit alone, then GPT-2's split.

    Raises WeightsError for a tokenizer of another kind and for a missing key.
    """
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise WeightsError(f"the GGUF tokenizer is {kind}; only ('gpt2', 'smollm') can be converted")
    try:
        tokens: list[str] = fields["tokenizer.ggml.tokens"]
        merges: list[str] = fields["tokenizer.ggml.merges"]
        token_types: list[int] = fields["tokenizer.ggml.token_type"]
        chat_template: str = fields["tokenizer.chat_template"]
        names = {
            f"{role}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
            for role, key in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")]
        }
        context_length: int = fields["llama.context_length"]
    except KeyError as error:
        raise WeightsError(f"the GGUF metadata has no {error}; a complete SmolLM2 file has it") from None

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": tokens[i], **flags} for i, kind in enumerate(token_types) if kind == CONTROL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    config = {
        # The class that takes tokenizer.json as it is; GPT2Tokenizer may put GPT-2's own split in its place.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": chat_template,
    }
    for name, content in [
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", names),
    ]:
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
