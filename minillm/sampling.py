"""From logits to tokens. Every row of a batch is treated alone, so what a request draws never depends on its company.

M rows to sample · V vocabulary
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from minillm.device import upload
from minillm.draws import uniform
from minillm.native import NotCompiled, function, library
from minillm.request import Request

Sampled = tuple[int, dict[int, float] | None]  # token (-1: the logits were not numbers), its log-probabilities


def sample(logits: Tensor, requests: Sequence[Request], best: Tensor | None = None) -> list[Sampled]:
    """logits [M, V], one row for each request -> M tokens. `best` [M] is `greedy(logits)`, where that is known already.

    Log-probabilities are the model's own, before penalties and temperature.

    On a GPU the host only asks for work, down to the fetch of the M tokens: there it waits for all that it asked for in
    this step. (Log-probabilities are fetched after that, for those rows alone that want them.)
    """
    adjusted = logits
    touched = [i for i, request in enumerate(requests) if needs_adjusting(request)]
    if touched:
        adjusted = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for i in touched:
            adjust(adjusted[i], requests[i])
    tokens = greedy(adjusted) if best is None or touched else best  # [M]
    random = [i for i, request in enumerate(requests) if request.params.temperature > 0]
    if random:
        rows = upload(random, torch.int64, logits.device)  # [R]
        drawn = draw(adjusted[rows], [requests[i] for i in random])
        tokens = tokens.index_copy(0, rows, torch.where(tokens[rows] < 0, -1, drawn))
    ids = tokens.tolist()  # the one wait
    return [(token, logprobs(logits[i], token, requests[i])) for i, token in enumerate(ids)]


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, or -1 where the logits are not numbers. [M, V] -> [M]"""
    in_c = greedy_in_c(logits.dtype) if logits.device.type == "cpu" else None
    if in_c:
        logits, tokens = logits.contiguous(), logits.new_empty(len(logits), dtype=torch.int64)
        in_c(logits.data_ptr(), tokens.data_ptr(), *logits.shape, torch.get_num_threads())
        return tokens
    best, tokens = logits.max(-1)  # [M]
    return torch.where(best.isfinite(), tokens, -1)  # a NaN anywhere in a row is its maximum


@cache
def greedy_in_c(dtype: torch.dtype) -> Callable[..., None] | None:
    """The same in C, in one pass over the logits; None where it cannot be had."""
    try:
        return function(library("greedy", dtype), "greedy", pointers=2, integers=2)
    except NotCompiled:
        return None


def needs_adjusting(request: Request) -> bool:
    p = request.params
    penalties = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
    return penalties or bool(p.logit_bias) or request.n_output < p.min_tokens


def adjust(row: Tensor, request: Request) -> None:
    """Penalties, bias and the ban on stopping early, in place. row [V], float32 at least."""
    p = request.params
    if p.repetition_penalty != 1:  # on prompt and output (Keskar et al. 2019)
        seen = upload(sorted(set(request.tokens)), torch.int64, row.device)
        value = row[seen]
        row[seen] = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
    if request.output and (p.presence_penalty or p.frequency_penalty):  # on the output alone
        counts = Counter(request.output)  # here: `unique` would wait, since its size depends on what is in it
        seen, times = upload([list(counts), list(counts.values())], torch.int64, row.device)
        row[seen] -= p.presence_penalty + p.frequency_penalty * times.to(row.dtype)
    for token, bias in p.logit_bias.items():
        row[token] += bias
    if request.n_output < p.min_tokens and request.stop_ids:
        row.index_fill_(0, upload(sorted(request.stop_ids), torch.int64, row.device), float("-inf"))


def draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """One draw for each row: filters the probabilities, then inverts their running sum at u. [R, V] -> tokens [R]"""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    info = torch.finfo(wide.dtype)  # an infinite temperature would make NaN of a banned token's -inf
    temperatures = [min(max(r.params.temperature, info.tiny), info.max) for r in requests]
    draws = [uniform(r.seed, r.sample_index, r.n_output) for r in requests]
    temperature, u = upload([temperatures, draws], wide.dtype, wide.device)  # [R] each
    # the maximum first: however small the temperature, nothing overflows, and the best token keeps weight 1
    wide = wide - wide.amax(-1, keepdim=True)
    weights = (wide / temperature[:, None]).exp()  # [R, V]
    filtered = [i for i, r in enumerate(requests) if r.params.top_k > 0 or r.params.top_p < 1 or r.params.min_p > 0]
    if filtered:
        rows = upload(filtered, torch.int64, wide.device)
        weights[rows] = keep_likely(weights[rows], [requests[i] for i in filtered])
    running = weights.cumsum(-1)  # [R, V]
    total = running[:, -1]
    # strictly below the total, so that rounding can never point past the last token with any weight
    target = torch.minimum(u * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(running, target[:, None], right=True).squeeze(-1)
    return tokens.clamp(max=logits.shape[-1] - 1)  # a row of NaN points nowhere; `sample` reports it


def keep_likely(weights: Tensor, requests: Sequence[Request]) -> Tensor:
    """Zeroes what top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024) leave out. [R, V] -> same

    Top-p keeps the smallest set of most likely tokens that holds at least that share of what top-k left.
    """
    V = weights.shape[-1]
    limits = [(r.params.top_k if 0 < r.params.top_k < V else V, r.params.top_p, r.params.min_p) for r in requests]
    top_k, top_p, min_p = upload(limits, weights.dtype, weights.device).T[..., None]  # [R, 1] each
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)  # [R, V]
    ordered = ordered.masked_fill(torch.arange(V, device=weights.device) >= top_k, 0.0)
    running = ordered.cumsum(-1)
    before = running - ordered  # [R, V] weight of all more likely tokens
    out = before >= top_p * running[:, -1:]
    out &= top_p < 1  # rounding must not drop the last tokens when it is off
    out |= ordered < min_p * ordered[:, :1]
    out[:, 0] = False  # the best token always stays
    return torch.zeros_like(weights).scatter(-1, index, ordered.masked_fill(out, 0.0))


def logprobs(row: Tensor, token: int, request: Request) -> dict[int, float] | None:
    """{token id: log-probability} of the chosen token and the most likely ones, if the request asked. row [V]"""
    wanted = request.params.logprobs
    if wanted is None or token < 0:
        return None
    logp = row.to(torch.promote_types(row.dtype, torch.float32)).log_softmax(-1)  # [V]
    values, ids = logp.topk(min(wanted, len(logp)))
    return {token: float(logp[token])} | dict(zip(ids.tolist(), values.tolist(), strict=True))
