"""Engines with one mistake each, as people make them. Each fails first at the level that is meant for it."""

import itertools
import os
import time
from collections import deque
from dataclasses import replace

import right
import torch

from minillm.engine import Engine as Ours


class OffByOne(right.Engine):
    """The positions of new tokens begin one too late."""

    def forward(self, text):
        if not text.computed:
            return super().forward(text)
        position = torch.tensor([len(text.tokens)])
        hidden = self.model(torch.tensor(text.tokens[-1:]), position, text.attend)
        text.computed += 1
        return self.model.logits(hidden[-1:])[0]


class LastOneNeverRead(right.Engine):
    """Samples from the row before the last."""

    def forward(self, text):
        positions = torch.arange(len(text.tokens))
        text.kept = {}
        return self.model.logits(self.model(torch.tensor(text.tokens), positions, text.attend)[-2:-1])[0]


class ReturnsThePrompt(right.Engine):
    def generate(self, prompts, params):
        return [[*prompt, *output] for prompt, output in zip(prompts, super().generate(prompts, params), strict=True)]


class ChangesThePrompt(right.Engine):
    """Appends to the list that it was given."""

    def add(self, key, prompt, params):
        super().add(key, prompt, params)
        self.waiting[-1].tokens = prompt


class GivesTensors(right.Engine):
    def generate(self, prompts, params):
        return [list(torch.tensor(output)) for output in super().generate(prompts, params)]


class GivesOneList(right.Engine):
    def generate(self, prompts, params):
        return super().generate(prompts, params)[0]


class TakesNoSetup:
    def __init__(self):
        pass


class GoesOnTooLong(right.Engine):
    def generate(self, prompts, params):
        return [[*output, output[-1]] for output in super().generate(prompts, params)]


class CallsOurs(right.Engine):
    """Nothing of its own: minillm's engine behind the adapter."""

    def generate(self, prompts, params):
        outputs = Ours(self.model).generate(prompts, params)
        return [output.token_ids for output in outputs]


class CallsAStage(right.Engine):
    """The same by a name that nobody finds in its imports."""

    def generate(self, prompts, params):
        from minillm.request import make_request

        stages = __import__("minillm." + "stages").stages
        requests = [make_request(*one, self.model.config, None, 256) for one in zip(prompts, params, strict=True)]
        list(stages.STAGES["cached"](self.model, requests))
        return [request.output for request in requests]


class KeepsOldTexts(right.Engine):
    """K and V of the first text stay for the next one."""

    def add(self, key, prompt, params):
        super().add(key, prompt, params)
        self.kept = self.waiting[-1].kept = getattr(self, "kept", {})


class Leaks(right.Engine):
    """Texts that run together share K and V."""

    def admit(self):
        super().admit()
        for text in self.running[1:]:
            if not text.computed:
                text.kept = self.running[0].kept


class TakesAsManyAsMayRun(right.Engine):
    """Forgets whoever comes after the first max_running prompts."""

    def generate(self, prompts, params):
        most = self.setup.max_running
        return super().generate(prompts[:most], params[:most])


class Crashes(right.Engine):
    def admit(self):
        super().admit()
        self.lengths = [len(text.tokens) for text in self.running]
        torch.tensor([text.tokens for text in self.running])  # of unequal lengths


class Hangs(right.Engine):
    """Waits for a place that nobody makes free."""

    def generate(self, prompts, params):
        while len(prompts) > self.setup.max_running:
            time.sleep(0.01)
        return super().generate(prompts, params)


class HangsForGood(right.Engine):
    """The same, and it does not let itself be interrupted."""

    def generate(self, prompts, params):
        while len(prompts) > self.setup.max_running:
            try:
                time.sleep(0.01)
            except Exception:
                continue
        return super().generate(prompts, params)


class Dies(right.Engine):
    def generate(self, prompts, params):
        if len(prompts[0]) == 30:
            os.kill(os.getpid(), 11)
        return super().generate(prompts, params)


class IgnoresTheSeed(right.Engine):
    def generate(self, prompts, params):
        same = [type(p)(max_tokens=p.max_tokens, temperature=p.temperature, seed=0, ignore_eos=True) for p in params]
        return super().generate(prompts, same)


class DrawsFromOneStream(right.Engine):
    """The seed moves on with every draw of anybody: a text depends on its company."""

    def __init__(self, setup):
        super().__init__(setup)
        self.count = itertools.count()

    def forward(self, text):
        if text.params.temperature:
            text.params = replace(text.params, seed=text.params.seed + next(self.count))
        return super().forward(text)


class ForgetsTopP(right.Engine):
    def add(self, key, prompt, params):
        super().add(key, prompt, params)
        object.__setattr__(self.waiting[-1].params, "top_p", 1.0)


class ForgetsEos(right.Engine):
    def add(self, key, prompt, params):
        super().add(key, prompt, params)
        self.waiting[-1].stops = set(params.stop_token_ids)


class ForgetsStopTokens(right.Engine):
    def add(self, key, prompt, params):
        super().add(key, prompt, params)
        self.waiting[-1].stops -= set(params.stop_token_ids)


class DropsTheEnd(right.Engine):
    """The token that ends a text is not given out."""

    def generate(self, prompts, params):
        eos = self.model.config.eos
        return [
            output[:-1] if output[-1] in {*p.stop_token_ids, *([] if p.ignore_eos else eos)} else output
            for output, p in zip(super().generate(prompts, params), params, strict=True)
        ]


class OnlyGenerates:
    def __init__(self, setup):
        self.generate = right.Engine(setup).generate


class WaitsForAll(right.Engine):
    """Static batching: nobody enters before all have ended."""

    def admit(self):
        if not self.running:
            super().admit()


class GoesOnAfterAbort(right.Engine):
    def abort(self, key):
        self.waiting = deque(text for text in self.waiting if text.key != key)


class AbortsTheOthers(right.Engine):
    def abort(self, key):
        super().abort(key)
        self.running = []


class NoReason(right.Engine):
    def step(self):
        return [(key, token, None) for key, token, _ in super().step()]

    def generate(self, prompts, params):
        outputs = [[] for _ in prompts]
        for key, one in enumerate(zip(prompts, params, strict=True)):
            self.add(key, *one)
        while self.waiting or self.running:
            for key, token, _ in super().step():
                outputs[key].append(token)
        return outputs


class LosesRequests(right.Engine):
    """Who finds no memory is forgotten."""

    def admit(self):
        super().admit()
        if len(self.running) < self.setup.max_running:
            self.waiting.clear()


class ForgetsItsPast(right.Engine):
    """Preempts, and begins anew with the prompt alone: what it had said already is said again."""

    def admit(self):
        if self.waiting and len(self.running) == 2 and self.setup.n_slots < 100 and not self.running[0].computed % 7:
            text = self.running.pop(0)
            text.tokens, text.kept, text.computed = text.tokens[: text.n_prompt], {}, 0
            self.waiting.append(text)
        super().admit()


class Unbounded(right.Engine):
    """Takes everyone, whatever there is room for."""

    def admit(self):
        while self.waiting and len(self.running) < self.setup.max_running:
            self.running.append(self.waiting.popleft())


class ReservesTheWholeContext(right.Engine):
    def __init__(self, setup):
        super().__init__(setup)
        c = self.model.config
        self.pool = torch.zeros(2, c.n_layers, setup.max_running, c.context, c.n_kv_heads, c.head_dim).double()


class Naive(right.Engine):
    """Right, and every token costs the whole text."""

    def forward(self, text):
        text.kept, text.computed = {}, 0
        return super().forward(text)


class Pads(right.Engine):
    """Right, and each prompt is pushed as if it were as long as the longest."""

    def forward(self, text):
        longest = max(len(other.tokens) - other.computed for other in self.running)
        pads = longest - len(text.tokens) + text.computed
        if pads:
            self.model(torch.zeros(pads, dtype=torch.int64), torch.arange(pads), lambda layer, q, k, v: q)
        return super().forward(text)


class CannotBeCounted(right.Engine):
    """Its products are not torch's."""

    def forward(self, text):
        with torch._C._DisableTorchDispatch():
            return super().forward(text)


class CountsItself(CannotBeCounted):
    tokens_pushed = 0

    def forward(self, text):
        self.tokens_pushed += len(text.tokens) - text.computed
        return super().forward(text)
