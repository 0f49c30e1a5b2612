"""A whole engine in one file, for `minillm check --engine`: K and V of each text apart, no batching of the matrices.

It reaches levels 1 to 6. Its texts take turns: one forward pass for each of them in every step.
"""

from collections import deque

import torch
from torch.nn.functional import scaled_dot_product_attention

from minillm.draws import uniform
from minillm.fusing import make_fast
from minillm.model import Llama


class Text:
    def __init__(self, key, prompt, params, eos):
        self.key, self.params, self.tokens, self.n_prompt = key, params, list(prompt), len(prompt)
        self.stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        self.kept = {}  # layer: K and V [Hkv, S, D] of every token computed so far
        self.computed = 0

    @property
    def most(self):
        return self.n_prompt + self.params.max_tokens

    def attend(self, layer, q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, T, D]
        if layer in self.kept:
            k, v = (torch.cat(pair, dim=1) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        positions = torch.arange(k.shape[1])
        mask = positions <= positions[-q.shape[1] :, None]  # [T, S]
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(0, 1)


def choose(logits, text):
    p, n = text.params, len(text.tokens) - text.n_prompt
    if p.temperature == 0:
        return int(logits.argmax())
    weights = ((logits - logits.max()) / p.temperature).exp()
    ordered, ids = weights.sort(descending=True, stable=True)
    if p.top_k > 0:
        ordered[p.top_k :] = 0
    if p.top_p < 1:
        running = ordered.cumsum(0)
        ordered[running - ordered >= p.top_p * running[-1]] = 0
    running = torch.zeros_like(weights).scatter(0, ids, ordered).cumsum(0)
    return int(torch.searchsorted(running, uniform(p.seed, 0, n) * running[-1], right=True))


class Engine:
    def __init__(self, setup):
        self.setup = setup
        self.model = make_fast(Llama.from_pretrained(setup.folder, setup.device, setup.dtype))
        self.waiting, self.running = deque(), []

    def add(self, key, prompt, params):
        self.waiting.append(Text(key, prompt, params, self.model.config.eos))

    def admit(self):
        """In order, while there is a place, and memory for all that each may ever keep."""
        while self.waiting and len(self.running) < self.setup.max_running:
            if sum(text.most for text in [*self.running, self.waiting[0]]) > self.setup.n_slots:
                return
            self.running.append(self.waiting.popleft())

    def forward(self, text):
        new = torch.tensor(text.tokens[text.computed :])
        positions = torch.arange(text.computed, len(text.tokens))
        hidden = self.model(new, positions, text.attend)  # [T, d]
        text.computed = len(text.tokens)
        return self.model.logits(hidden[-1:])[0]  # [V]

    def step(self):
        self.admit()
        events = []
        for text in self.running:
            token = choose(self.forward(text), text)
            text.tokens.append(token)
            reason = "stop" if token in text.stops else "length" if len(text.tokens) == text.most else None
            events.append((text.key, token, reason))
        ended = {key for key, _, reason in events if reason}
        self.running = [text for text in self.running if text.key not in ended]
        return events

    def abort(self, key):
        self.running = [text for text in self.running if text.key != key]
        self.waiting = deque(text for text in self.waiting if text.key != key)

    def generate(self, prompts, params):
        for key, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            self.add(key, prompt, p)
        outputs = [[] for _ in prompts]
        while self.waiting or self.running:
            for key, token, _ in self.step():
                outputs[key].append(token)
        return outputs
