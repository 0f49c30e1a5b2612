"""The engine: schedule, run, sample, update. The public API: `generate`, `stream`, and `add` / `step` / `abort`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from minillm.batch import pack
from minillm.cache import KVPool
from minillm.draws import fresh_seed
from minillm.errors import InputError, whole_number
from minillm.fusing import make_fast
from minillm.graphs import decodes, record_graphs
from minillm.kernels import backend as find_backend
from minillm.kernels.choose import resolve
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.policies import policy as find_policy
from minillm.request import Event, Request, make_request
from minillm.sampling import Sampled, sample
from minillm.scheduler import Plan, Scheduler
from minillm.slots import RegionSlots, Slots
from minillm.tokenizer import Tokenizer

Prompt = str | Sequence[int]
MOST_SAMPLES = 128  # of one prompt


@dataclass
class Output:
    """A finished text. `token_ids` holds what was sampled, the stop token included; `text` has neither stop
    tokens nor stop strings."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)  # one for each token, if asked for


class Engine:
    """Many requests on one model, with continuous batching.

    max_running  most sequences in one step (N)
    budget       most new tokens in one step (m); at least max_running
    max_len      most positions stored for one request: longer prompts are refused, longer texts end with "length"
    backend      a name from `kernels.BACKENDS`, or "auto": the one that is the fastest here (see `kernels.choose`)
    slots        how KV memory is given out: (max_running, max_len) to one of the kinds in `slots` and `sharing`, which
                 says how much there is; `functools.partial(SharedSlots, n_slots=8192)`, for example
    policy       who joins next: a name from `policies.POLICIES`

    On a GPU, steps that only decode run from CUDA graphs if the backend can be recorded: see `graphs`. Setting
    `engine.graphs = None` makes every step run eagerly, as on a CPU.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer | None = None,
        *,
        max_running: int = 32,
        budget: int = 512,
        max_len: int | None = None,
        backend: str = "gather",
        slots: Callable[[int, int], Slots] = RegionSlots,
        policy: str = "first-come",
    ):
        longest = model.config.context
        max_len = min(longest, 2048) if max_len is None else max_len
        if not 1 <= max_len <= longest:
            raise InputError(f"max_len is {max_len}; it must be from 1 to the model's context, {longest}")
        self.attend = find_backend(resolve(backend, model, max_running))
        self.model, self.tokenizer = model, tokenizer
        self.scheduler = Scheduler(slots(max_running, max_len), max_running, budget, find_policy(policy))
        self.max_len = self.scheduler.slots.capacity
        self.pool = KVPool(model, self.scheduler.slots.n_slots, max_running, self.max_len)
        self.graphs = record_graphs(model, self.pool, self.attend, max_running)
        self._requests: dict[int, Request] = {}  # unfinished ones
        self._inbox: list[Event] = []  # made while someone else's `generate` or `stream` was stepping

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path = "smollm2-135m-instruct",
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        max_running: int = 32,
        budget: int = 512,
        max_len: int | None = None,
        backend: str = "auto",
        slots: Callable[[int, int], Slots] = RegionSlots,
        policy: str = "first-come",
    ) -> "Engine":
        """Model and tokenizer from one folder, or by a name that `minillm weights` knows."""
        from minillm.fetch import find

        folder = find(path_or_name)
        tokenizer = Tokenizer.from_pretrained(folder)
        model = make_fast(Llama.from_pretrained(folder, device=device, dtype=dtype))
        return cls(
            model,
            tokenizer,
            max_running=max_running,
            budget=budget,
            max_len=max_len,
            backend=backend,
            slots=slots,
            policy=policy,
        )

    @property
    def busy(self) -> bool:
        """Whether another `step` would bring anything."""
        return self.scheduler.busy or bool(self._inbox)

    def add(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Request:
        """Queues a prompt. Raises InputError, and queues nothing, for one that can never be served."""
        return self.add_samples(prompt, params, 1, priority=priority)[0]

    def add_samples(
        self, prompt: Prompt, params: SamplingParams | None = None, n: int = 1, *, priority: int = 0
    ) -> list[Request]:
        """Queues n samples of one prompt; the i-th draws what it would draw alone with `sample_index` i. Where memory
        is shared, the prompt is computed once."""
        requests = self._make(prompt, params or SamplingParams(), n, priority)
        self.submit(*requests)
        return requests

    def submit(self, *requests: Request) -> None:
        """Queues a request made by `make_request`, or several that are samples of the same prompt."""
        if any(request.prompt != requests[0].prompt for request in requests):
            raise InputError("requests with different prompts were submitted as samples of one; submit each alone")
        for request in requests:
            self.scheduler.slots.check(request)
            if request.submitted or requests.count(request) > 1:
                raise InputError(f"request {request.id} was submitted before; make a new one for each text")
        for request in requests:
            self._requests[request.id] = request
            request.submitted = True
        if self.scheduler.slots.shares:  # the first computes the prompt, and the others wait for it
            first, *others = requests
            first.samples = others
            for other in others:
                other.leader = first
            requests = (first,)
        for request in requests:
            self.scheduler.waiting.add(request)

    def step(self) -> list[Event]:
        """One forward pass over whatever the scheduler chose; an event for each token sampled.

        If the model raises, no token is lost: the next step plans the same again.
        """
        plan = self.scheduler.schedule()
        if plan:
            sampled = self.graphs(plan) if self.graphs and decodes(plan) else self._forward(plan)
            self._inbox += self.scheduler.update(plan, sampled)
        events, self._inbox = self._inbox, []
        for event in events:
            if event.finish_reason is not None:
                self._requests.pop(event.request.id, None)
        return events

    def _forward(self, plan: Plan) -> dict[Request, Sampled]:
        """What is sampled for each request of the plan, and nothing for those whose prompts end in a later step."""
        batch = pack(plan, self.pool)
        hidden = self.model(batch.tokens, batch.positions, self.attend(self.pool, batch))  # [T, d]
        sampled = sample(self.model.logits(hidden[batch.last]), batch.samples) if batch.samples else []
        return dict(zip(batch.samples, sampled, strict=True))

    def abort(self, request_id: int) -> Event | None:
        """Ends a request in any state and frees what it held; None if it is unknown or had already ended."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self._inbox = [event for event in self._inbox if event.request is not request]  # no token after the abort
        return self.scheduler.abort(request)

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Event]:
        """Events of all prompts as they happen. Bad input raises at once; the prompts are queued when the loop
        begins, and leaving it early aborts what is unfinished."""
        return self._run(self._make_all(prompts, params))

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, n: int = 1
    ) -> list[Output]:
        """Finished texts, in the order of the prompts, n for each. `params` is one for all, or one for each."""
        groups = self._make_all(prompts, params, n)
        outputs = {request: Output(request.prompt) for group in groups for request in group}
        for event in self._run(groups):
            output = outputs[event.request]
            output.text += event.text
            output.finish_reason = event.finish_reason
            if event.token is not None:
                output.token_ids.append(event.token)
            if event.logprobs is not None:
                output.logprobs.append(event.logprobs)
        return list(outputs.values())

    def _make(self, prompt: Prompt, params: SamplingParams, n: int, priority: int = 0) -> list[Request]:
        whole_number("n", n, 1, MOST_SAMPLES)
        if params.seed is None:
            params = replace(params, seed=fresh_seed())  # one for all n: they differ by their index
        requests: list[Request] = []
        for i in range(n):
            ids = requests[0].prompt if requests else prompt  # a text is encoded once
            config, tokenizer = self.model.config, self.tokenizer
            requests.append(
                make_request(ids, params, config, tokenizer, self.max_len, sample_index=i, priority=priority)
            )
        return requests

    def _make_all(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, n: int = 1
    ) -> list[list[Request]]:
        """All or none: every prompt is checked before the first is queued."""
        if isinstance(prompts, str):
            raise InputError("prompts is one string; pass a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(f"there are {len(prompts)} prompts, but {len(params)} sampling params")
        return [self._make(prompt, p, n) for prompt, p in zip(prompts, params, strict=True)]

    def _run(self, groups: Sequence[Sequence[Request]]) -> Iterator[Event]:
        """Steps until these have ended and all their events were read; others' events wait in the inbox."""
        mine = {request for group in groups for request in group}
        try:
            for group in groups:
                self.submit(*group)
            unfinished = set(mine)
            while unfinished or any(e.request in mine for e in self._inbox):
                events = self.step()
                self._inbox += [event for event in events if event.request not in mine]
                # asked anew for each: the reader may abort another request between two events of one step
                yield from (e for e in events if e.request in mine and e.request.finish_reason != "abort")
                unfinished = {request for request in unfinished if request.finish_reason is None}
        finally:
            for request in mine:
                self.abort(request.id)
            self._inbox = [event for event in self._inbox if event.request not in mine]
