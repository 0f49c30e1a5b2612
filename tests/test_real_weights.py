"""SmolLM2-135M-Instruct, the real thing: our logits are those of transformers, and it knows the capital of France."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm.attention import SelfAttend
from minillm.batch import pack
from minillm.cache import KVPool
from minillm.engine import Engine
from minillm.kernels import backend
from minillm.model import Llama
from minillm.request import Request, SamplingParams
from minillm.weights import load

TEXT = (
    "A cache keeps what was computed once, so that it need not be computed again. In a transformer the keys and "
    "values of every token depend on the tokens before it alone, never on those that follow; therefore they can be "
    "kept from one step to the next. It costs memory: 23,040 bytes for each token of this model at 16 bits. For "
    "300 sequences of 1,000 tokens that is 6.9 GB! def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2) # ok?\n"
    "Le cœur a ses raisons que la raison ne connaît point. 今日は良い天気ですね。 Finally, the measure of a scheduler "
    "is not how fast one text is, but how many texts are served while none of them is made to wait too long."
)


@dataclass
class Real:
    ours: Llama
    theirs: Any
    tokenizer: Any  # theirs
    prompt: list[int]  # 200 tokens
    expected: Tensor  # their logits of it [200, V]


@pytest.fixture(scope="module")
def real(real_weights: Path) -> Iterator[Real]:
    """Both models in float32, loaded once."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(real_weights, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_weights)
    prompt = tokenizer(TEXT)["input_ids"][:200]
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    yield Real(load(real_weights, "cpu", "float32"), theirs, tokenizer, prompt, expected)
    transformers.utils.logging.enable_progress_bar()


def test_logits_are_those_of_transformers(real: Real) -> None:
    assert len(real.prompt) == 200
    positions = torch.arange(200)
    logits = real.ours.logits(real.ours(torch.tensor(real.prompt), positions, SelfAttend(positions)))
    assert (logits - real.expected).abs().max() < 1e-3
    assert torch.equal(logits.argmax(-1), real.expected.argmax(-1))


@pytest.mark.parametrize("name", ["dense", "gather"])
def test_logits_in_chunks_beside_another_text(real: Real, name: str) -> None:
    """The same prompt in chunks of 64, with its last half as a neighbour that decodes one token a step."""
    pool = KVPool(real.ours, 420, 2, 210)
    requests = [
        Request(real.prompt, SamplingParams(), 0, 1),
        Request(real.prompt[100:], SamplingParams(), 0, 1),
    ]
    for row, request in enumerate(requests):
        request.row, request.slots = row, range(210 * row, 210 * row + len(request.tokens))
    main, neighbour = requests
    logits = []
    for start in range(0, 200, 64):
        n = min(64, 200 - start)
        packed = pack([(neighbour, 1), (main, n)], pool)
        hidden = real.ours(packed.tokens, packed.positions, backend(name)(pool, packed))
        logits.append(real.ours.logits(hidden[1:]))
        main.computed, neighbour.computed = start + n, neighbour.computed + 1
    assert (torch.cat(logits) - real.expected).abs().max() < 1e-3


def test_the_capital_of_france(real: Real) -> None:
    """vllm#9519: through their own chat template, whose ids we take as they are; it stops by itself."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = real.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    engine = Engine(real.ours, max_running=2, max_len=256)
    [output] = engine.generate([ids], SamplingParams(max_tokens=32))
    assert "Paris" in real.tokenizer.decode(output.token_ids)
    assert output.finish_reason == "stop" and output.token_ids[-1] == 2
    with torch.no_grad():
        theirs = real.theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=32)
    assert output.token_ids == theirs[0, len(ids) :].tolist()
