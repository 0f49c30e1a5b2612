"""From logits to tokens. Every row of a batch is treated alone, so what a request draws never depends on its company.

M rows to sample · V vocabulary
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.draws import uniform
from minillm.request import Request

Sampled = tuple[int, dict[int, float] | None]  # token (-1: the logits were not numbers), its log-probabilities


def sample(logits: Tensor, requests: Sequence[Request]) -> list[Sampled]:
    """logits [M, V], one row for each request -> M tokens.

    Log-probabilities are the model's own, before penalties and temperature.
    """
    adjusted = logits
    touched = [i for i, request in enumerate(requests) if needs_adjusting(request)]
    if touched:
        adjusted = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for i in touched:
            adjust(adjusted[i], requests[i])
    best, tokens = adjusted.max(-1)  # [M]
    random = [i for i, request in enumerate(requests) if request.params.temperature > 0]
    if random:
        tokens[random] = draw(adjusted[random], [requests[i] for i in random])
    tokens = torch.where(best.isfinite(), tokens, -1)  # a NaN anywhere in a row is its maximum
    return [(token, logprobs(logits[i], token, requests[i])) for i, token in enumerate(tokens.tolist())]


def needs_adjusting(request: Request) -> bool:
    p = request.params
    penalties = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
    return penalties or bool(p.logit_bias) or request.n_output < p.min_tokens


def adjust(row: Tensor, request: Request) -> None:
    """Penalties, bias and the ban on stopping early, in place. row [V], float32 at least."""
    p = request.params
    if p.repetition_penalty != 1:  # on prompt and output (Keskar et al. 2019)
        seen = torch.tensor(sorted(set(request.tokens)), device=row.device)
        value = row[seen]
        row[seen] = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
    if request.output and (p.presence_penalty or p.frequency_penalty):  # on the output alone
        seen, times = torch.tensor(request.output, device=row.device).unique(return_counts=True)
        row[seen] -= p.presence_penalty + p.frequency_penalty * times.to(row.dtype)
    for token, bias in p.logit_bias.items():
        row[token] += bias
    if request.n_output < p.min_tokens and request.stop_ids:
        row[sorted(request.stop_ids)] = float("-inf")


def draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """One draw for each row: filters the probabilities, then inverts their running sum at u. [R, V] -> tokens [R]"""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    info = torch.finfo(wide.dtype)  # an infinite temperature would make NaN of a banned token's -inf
    temperature = torch.tensor(
        [min(max(r.params.temperature, info.tiny), info.max) for r in requests], dtype=wide.dtype
    )  # [R]
    # the maximum first: however small the temperature, nothing overflows, and the best token keeps weight 1
    wide = wide - wide.amax(-1, keepdim=True)
    weights = (wide / temperature.to(wide.device)[:, None]).exp()  # [R, V]
    filtered = [i for i, r in enumerate(requests) if r.params.top_k > 0 or r.params.top_p < 1 or r.params.min_p > 0]
    if filtered:
        weights[filtered] = keep_likely(weights[filtered], [requests[i] for i in filtered])
    running = weights.cumsum(-1)  # [R, V]
    u = torch.tensor([uniform(r.seed, r.sample_index, r.n_output) for r in requests], dtype=wide.dtype)  # [R]
    total = running[:, -1]
    # strictly below the total, so that rounding can never point past the last token with any weight
    target = torch.minimum(u.to(wide.device) * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(running, target[:, None], right=True).squeeze(-1)
    return tokens.clamp(max=logits.shape[-1] - 1)  # a row of NaN points nowhere; `sample` reports it


def keep_likely(weights: Tensor, requests: Sequence[Request]) -> Tensor:
    """Zeroes what top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024) leave out. [R, V] -> same

    Top-p keeps the smallest set of most likely tokens that holds at least that share of what top-k left.
    """
    V = weights.shape[-1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=weights.dtype, device=weights.device)[:, None]  # [R, 1]

    ordered, index = weights.sort(dim=-1, descending=True, stable=True)  # [R, V]
    top_k = column([r.params.top_k if 0 < r.params.top_k < V else V for r in requests])
    ordered = ordered.masked_fill(torch.arange(V, device=weights.device) >= top_k, 0.0)
    running = ordered.cumsum(-1)
    before = running - ordered  # [R, V] weight of all more likely tokens
    out = before >= column([r.params.top_p for r in requests]) * running[:, -1:]
    out &= column([r.params.top_p for r in requests]) < 1  # rounding must not drop the last tokens when it is off
    out |= ordered < column([r.params.min_p for r in requests]) * ordered[:, :1]
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
