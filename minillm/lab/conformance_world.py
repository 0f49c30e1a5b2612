"""What an engine is checked against: a small random model in a folder, and the naive stage's texts of it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from minillm.lab.conformance import Setup
from minillm.lab.conformance_source import Source
from minillm.lab.conformance_theirs import Theirs
from minillm.lab.seeds import mixed, rng
from minillm.lab.tiny import TINY
from minillm.lab.work import Wrong
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import make_request
from minillm.stages import naive
from minillm.weights import sources_of, split_shape

# a size of its own for the MLP, so that a product over it can be told from all others (see `conformance_count`)
CONFIG = replace(TINY, d_ff=74, eos=())
FREE = 10_000  # slots: as many as anyone could want


def write_folder(folder: Path, model: Llama) -> Path:
    """The model as a checkpoint of the Hugging Face layout, in its own dtype."""
    c = model.config
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parts = split_shape(name, tuple(parameter.shape), c)
        pieces = parameter.detach().split([shape[0] for shape in parts])
        tensors |= {source: piece.contiguous() for source, piece in zip(sources_of(name), pieces, strict=True)}
    raw = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.d_ff,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.context,
        "tie_word_embeddings": c.tied,
        "eos_token_id": list(c.eos),
        "hidden_act": "silu",
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    return folder


class World:
    """Draws its inputs through `lab.seeds`: in a variant the model and all prompts are others."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._texts: dict[tuple[tuple[int, ...], str], tuple[list[int], str | None]] = {}

    @cached_property
    def model(self) -> Llama:
        """Its end-of-text token is one that greedy texts really reach, and not at once."""
        model = Llama.random(CONFIG, seed=mixed(0), dtype=torch.float64)
        self.folder.mkdir(exist_ok=True)
        # the end of text is known to the requests, and not to the weights: it may be chosen afterwards
        model.config = CONFIG
        text = self._naive(model, self.prompts(1, [5])[0], SamplingParams(max_tokens=12, ignore_eos=True))[0]
        later = [token for i, token in enumerate(text) if i > 1 and token not in text[:i]]
        model.config = replace(CONFIG, eos=(later[0] if later else text[-1],))
        write_folder(self.folder, model)
        return model

    def prompts(self, number: int, lengths: Sequence[int]) -> list[list[int]]:
        """Of these lengths, the same for the same number."""
        draw = rng(number)
        return [[draw.randrange(CONFIG.vocab_size) for _ in range(length)] for length in lengths]

    def expected(self, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], str | None]:
        """The naive stage's tokens, and why the text ended."""
        key = tuple(prompt), repr(params)
        if key not in self._texts:
            self._texts[key] = self._naive(self.model, prompt, params)
        return self._texts[key]

    @staticmethod
    def _naive(model: Llama, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], str | None]:
        request = make_request(prompt, params, model.config, None, model.config.context)
        list(naive.generate(model, [request]))
        return request.output, request.finish_reason

    def engine(self, source: Source, max_running: int = 4, n_slots: int = FREE) -> Theirs:
        config = self.model.config  # and with it the folder
        setup = Setup(self.folder, "float64", "cpu", max_running, n_slots)
        return Theirs(source, setup, config.vocab_size)

    def compare(self, which: str, got: Sequence[int], prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises Wrong unless it is the naive text, to the last token."""
        right, _ = self.expected(prompt, params)
        if list(got) == right:
            return
        of = f"{which} (prompt of {len(prompt)} tokens)"
        if list(got[: len(prompt)]) == list(prompt) and len(got) > len(right):
            raise Wrong(f"{of}: the output begins with the prompt; return the new tokens alone")
        for i, (mine, theirs) in enumerate(zip(got, right, strict=False)):
            if mine != theirs:
                before = f"the first {i} right" if i else "none right"
                raise Wrong(f"{of}: new token {i} is {mine}, and must be {theirs} (counted from 0; {before})")
        if len(got) > len(right):
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.model.config.eos)}
            if right and right[-1] in stops:
                raise Wrong(f"{of}: it goes on after token {right[-1]}, which ends a text")
            raise Wrong(f"{of}: it has {len(got)} new tokens, and max_tokens is {params.max_tokens}")
        missing = "; the token that ends a text belongs to it" if list(got) == right[:-1] else ""
        raise Wrong(f"{of}: it has {len(got)} new tokens, and should have {len(right)}{missing}")
