"""Wrong parts of a Llama: what learners write, and what real engines have had."""

from wrong import Mutant

WRONG = [
    # ---- rms_norm
    Mutant(
        "norm statistics in x's own dtype",
        """
def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
""",
        "rms_norm in bfloat16",
    ),
    Mutant(
        "norm squares float16 in float16",
        """
def rms_norm(x, weight, eps):
    mean = x.square().mean(-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x * torch.rsqrt(mean + eps)).to(x.dtype) * weight
""",
        "rms_norm of float16 numbers near 500",
    ),
    Mutant(
        "norm multiplies by the weight before rounding back",
        """
def rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
""",
        "rms_norm in bfloat16",
    ),
    Mutant(
        "norm leaves float32 when x is bfloat16",
        """
def rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
""",
        "the dtype must be torch.float16",
    ),
    Mutant(
        "norm takes float64 down to float32",
        """
def rms_norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
""",
        "rms_norm in float64",
    ),
    Mutant(
        "eps outside the root",
        """
def rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps)
    return normed.to(x.dtype) * weight
""",
        "with eps 1e-05",
    ),
    Mutant(
        "eps forgotten",
        """
def rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True))
    return normed.to(x.dtype) * weight
""",
        "with eps 1e-05",
    ),
    Mutant(
        "LayerNorm: the mean is subtracted too",
        """
def rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
""",
        "rms_norm of x [6]",
    ),
    Mutant(
        "one root mean square for the whole tensor",
        """
def rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean() + eps)).to(x.dtype) * weight
""",
        "rms_norm of x [4, 6]",
    ),
    Mutant(
        "sum of squares for their mean",
        """
def rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype) * weight
""",
        "rms_norm of x [6]",
    ),
    Mutant(
        "norm works in place",
        """
def rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide *= torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight
""",
        "rms_norm changed its argument number 1",
    ),
    Mutant(
        "norm forgets the weight: not the block's fault",
        """
def rms_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
""",
        "mend rms_norm first: with a right one in the place of yours, this holds",
    ),
    # ---- frequencies
    Mutant(
        "exponent counts in ones",
        """
def frequencies(head_dim, theta):
    return theta ** (-torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
""",
        "frequencies(8, 10000): ",
    ),
    Mutant(
        "wavelengths for frequencies",
        """
def frequencies(head_dim, theta):
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
""",
        "frequencies(8, 10000): ",
    ),
    Mutant(
        "frequencies in float32",
        """
def frequencies(head_dim, theta):
    return theta ** (-torch.arange(0, head_dim, 2) / head_dim)
""",
        "the dtype must be torch.float64",
    ),
    Mutant(
        "frequencies computed in float32, then widened",
        """
def frequencies(head_dim, theta):
    return (1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)).double()
""",
        "frequencies(64, 100000): ",
    ),
    # ---- rotate
    Mutant(
        "interleaved for half-split pairs",
        """
def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., half:]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
""",
        "0 is paired with 4",
    ),
    Mutant(
        "minus sign put in twice",
        """
def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin
""",
        "rotate of x [5, 3, 8]",
    ),
    Mutant(
        "half the vector mirrored, not swapped",
        """
def rotate(x, cos, sin):
    return x * cos + x.flip(-1) * sin
""",
        "0 is paired with 4",
    ),
    Mutant(
        "halves of the heads swapped, not of the dimensions",
        """
def rotate(x, cos, sin):
    return x * cos + x.roll(x.shape[-2] // 2, -2) * sin
""",
        "rotate of a head that is 1 in dimension 0",
    ),
    Mutant(
        "rotated in float32 and left there",
        """
def rotate(x, cos, sin):
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat((a, b), -1) * cos + torch.cat((b, a), -1) * sin
""",
        "rotate in bfloat16, against float64: the dtype must be torch.bfloat16",
    ),
    Mutant(
        "only the first half is turned",
        """
def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    half = a.shape[-1]
    return torch.cat((a * cos[..., :half] + b * sin[..., :half], b), -1)
""",
        "scores q . k",
    ),
    # ---- visible
    Mutant(
        "mask off by one: not itself",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    mask = k_pos[..., None, :] < q_pos[..., :, None]
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[..., None, :] == q_seq[..., :, None])
    return mask
""",
        "the query at position 0 must see the key at 0",
    ),
    Mutant(
        "mask off by one: the next token too",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    mask = k_pos[..., None, :] <= q_pos[..., :, None] + 1
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[..., None, :] == q_seq[..., :, None])
    return mask
""",
        "the query at position 0 must not see the key at 1",
    ),
    Mutant(
        "true means hidden",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    mask = k_pos[..., None, :] > q_pos[..., :, None]
    if q_seq is not None and k_seq is not None:
        mask = mask | (k_seq[..., None, :] != q_seq[..., :, None])
    return mask
""",
        "the query at position 0 must see the key at 0",
    ),
    Mutant(
        "top-left causal",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    mask = torch.ones(*q_pos.shape, k_pos.shape[-1], dtype=torch.bool).tril()
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[..., None, :] == q_seq[..., :, None])
    return mask
""",
        "the query at position 4 must see the key at 1",
    ),
    Mutant(
        "bottom-right causal by sizes, not positions",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    T, S = q_pos.shape[-1], k_pos.shape[-1]
    mask = torch.ones(*q_pos.shape, S, dtype=torch.bool).tril(S - T)
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[..., None, :] == q_seq[..., :, None])
    return mask
""",
        "visible for queries [",
    ),
    Mutant(
        "one row of positions for all rows",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    mask = k_pos[None, :] <= q_pos[:, None]
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[None, :] == q_seq[:, None])
    return mask
""",
        "visible raised RuntimeError",
    ),
    Mutant(
        "sequences ignored",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    return k_pos[..., None, :] <= q_pos[..., :, None]
""",
        "the query at position 0 of text 0 must not see the key at 0 of text 1",
    ),
    Mutant(
        "mask of numbers, not of truths",
        """
def visible(q_pos, k_pos, q_seq=None, k_seq=None):
    mask = k_pos[..., None, :] <= q_pos[..., :, None]
    if q_seq is not None and k_seq is not None:
        mask = mask & (k_seq[..., None, :] == q_seq[..., :, None])
    return mask.float()
""",
        "the dtype must be torch.bool",
    ),
    # ---- sdpa
    Mutant(
        "heads tiled for repeated",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = torch.cat([k] * G, -2), torch.cat([v] * G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~mask[..., None, :, :], float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2).masked_fill(~mask.any(-1)[..., None, None], 0.0)
""",
        "query head 1 must read key-value head 0",
    ),
    Mutant(
        "scale missing",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~mask[..., None, :, :], float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2).masked_fill(~mask.any(-1)[..., None, None], 0.0)
""",
        "weigh 0.75 and 0.25",
    ),
    Mutant(
        "divided by D, not by its root",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q @ k.transpose(-2, -1) / q.shape[-1]).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~mask[..., None, :, :], float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2).masked_fill(~mask.any(-1)[..., None, None], 0.0)
""",
        "weigh 0.75 and 0.25",
    ),
    Mutant(
        "mask after the softmax",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.softmax(-1).masked_fill(~mask[..., None, :, :], 0.0).to(v.dtype)
    return (weights @ v).transpose(-3, -2)
""",
        "visible keys (head 0) must sum to 1",
    ),
    Mutant(
        "hidden scores set to 0",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = (scores * mask[..., None, :, :]).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2).masked_fill(~mask.any(-1)[..., None, None], 0.0)
""",
        "in keys and values that nobody may see",
    ),
    Mutant(
        "a bias of -100 for what is hidden",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = (scores - 100.0 * ~mask[..., None, :, :]).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2).masked_fill(~mask.any(-1)[..., None, None], 0.0)
""",
        "in keys and values that nobody may see",
    ),
    Mutant(
        "fully masked row gives NaN",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~mask[..., None, :, :], float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2)
""",
        "where query 1 sees nothing has NaN",
    ),
    Mutant(
        "-1e9 for -inf: a fully masked row gives the mean of what is hidden",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~mask[..., None, :, :], -1e9).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2)
""",
        "where query 1 sees nothing: ",
    ),
    Mutant(
        "fully masked row multiplied by 0",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~mask[..., None, :, :], float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2) * mask.any(-1)[..., None, None]
""",
        "where query 1 sees nothing has NaN",
    ),
    Mutant(
        "softmax over the queries",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~mask[..., None, :, :], float("-inf")).softmax(-2).to(v.dtype)
    return (weights @ v).transpose(-3, -2).masked_fill(~mask.any(-1)[..., None, None], 0.0)
""",
        "weigh 0.75 and 0.25",
    ),
    Mutant(
        "softmax in float32 for float64",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).float()
    weights = scores.masked_fill(~mask[..., None, :, :], float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2).masked_fill(~mask.any(-1)[..., None, None], 0.0)
""",
        "sdpa in float64",
    ),
    Mutant(
        "softmax by hand, without taking the maximum away",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.exp() * mask[..., None, :, :]
    weights = (weights / weights.sum(-1, keepdim=True)).to(v.dtype)
    return (weights @ v).transpose(-3, -2).masked_fill(~mask.any(-1)[..., None, None], 0.0)
""",
        "sdpa with scores in the hundreds has NaN",
    ),
    Mutant(
        "the mask is written into the caller's",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    nothing = ~mask.any(-1)
    mask[nothing] = True
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~mask[..., None, :, :], float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2).masked_fill(nothing[..., None, None], 0.0)
""",
        "sdpa changed its argument number 4",
    ),
    Mutant(
        "mask without a dimension for the heads",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(-3, -2).masked_fill(~mask.any(-1)[..., None, None], 0.0)
""",
        "mask [5, 3, 4]. Scores are [..., H, T, S], and the mask is [..., T, S]:\ngive it a dimension for the heads",
    ),
    Mutant(
        "heads looked for at the first dimension: only one text works",
        """
def sdpa(q, k, v, mask):
    G = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(G, -2), v.repeat_interleave(G, -2)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32))
    weights = scores.masked_fill(~mask[..., None, :, :], float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(0, 1).masked_fill(~mask.any(-1)[..., None, None], 0.0)
""",
        "count dimensions from the end",
    ),
    # ---- swiglu
    Mutant(
        "silu on up",
        """
def swiglu(x, gate, up, down):
    return F.linear(F.linear(x, gate) * F.silu(F.linear(x, up)), down)
""",
        "swiglu with gate x = -40",
    ),
    Mutant(
        "sigmoid for silu",
        """
def swiglu(x, gate, up, down):
    return F.linear(F.linear(x, gate).sigmoid() * F.linear(x, up), down)
""",
        "swiglu of x [5]",
    ),
    Mutant(
        "gelu for silu",
        """
def swiglu(x, gate, up, down):
    return F.linear(F.gelu(F.linear(x, gate)) * F.linear(x, up), down)
""",
        "swiglu of x [5]",
    ),
    Mutant(
        "weights not transposed",
        """
def swiglu(x, gate, up, down):
    return (F.silu(x @ gate) * (x @ up)) @ down
""",
        "swiglu raised RuntimeError",
    ),
    # ---- block
    Mutant(
        "k not rotated",
        """
def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    qkv = F.linear(rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps), attn.qkv.weight)
    q, k, v = qkv.unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2)
    x = x + F.linear(sdpa(rotate(q, cos, sin), k, v, mask).flatten(-2), attn.o.weight)
    h = rms_norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps)
    return x + swiglu(h, *mlp.gate_up.weight.chunk(2), mlp.down.weight)
""",
        "the first block that differs is 0",
    ),
    Mutant(
        "rms_norm and block both wrong: both are told",
        """
def rms_norm(x, weight, eps):
    return x * weight

def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    qkv = F.linear(rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps), attn.qkv.weight)
    q, k, v = qkv.unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2)
    x = x + F.linear(sdpa(rotate(q, cos, sin), k, v, mask).flatten(-2), attn.o.weight)
    h = rms_norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps)
    return x + swiglu(h, *mlp.gate_up.weight.chunk(2), mlp.down.weight)
""",
        "; what goes into it, the embeddings, is right\n(this stays so with a right rms_norm in the place of yours)",
    ),
    Mutant(
        "v rotated too",
        """
def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    qkv = F.linear(rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps), attn.qkv.weight)
    q, k, v = (rotate(t, cos, sin) for t in qkv.unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2))
    x = x + F.linear(sdpa(q, k, v, mask).flatten(-2), attn.o.weight)
    h = rms_norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps)
    return x + swiglu(h, *mlp.gate_up.weight.chunk(2), mlp.down.weight)
""",
        "only its attention half",
    ),
    Mutant(
        "x is normed, and the normed x goes on",
        """
def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    x = rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps)
    q, k, v = F.linear(x, attn.qkv.weight).unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2)
    x = x + F.linear(sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v, mask).flatten(-2), attn.o.weight)
    x = rms_norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps)
    return x + swiglu(x, *mlp.gate_up.weight.chunk(2), mlp.down.weight)
""",
        "which must give x back",
    ),
    Mutant(
        "norm after the half, not before it",
        """
def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    q, k, v = F.linear(x, attn.qkv.weight).unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2)
    a = F.linear(sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v, mask).flatten(-2), attn.o.weight)
    x = rms_norm(x + a, layer.attn_norm.weight, layer.attn_norm.eps)
    m = swiglu(x, *mlp.gate_up.weight.chunk(2), mlp.down.weight)
    return rms_norm(x + m, layer.mlp_norm.weight, layer.mlp_norm.eps)
""",
        "which must give x back",
    ),
    Mutant(
        "attention's residual lost",
        """
def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    qkv = F.linear(rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps), attn.qkv.weight)
    q, k, v = qkv.unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2)
    x = F.linear(sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v, mask).flatten(-2), attn.o.weight)
    h = rms_norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps)
    return x + swiglu(h, *mlp.gate_up.weight.chunk(2), mlp.down.weight)
""",
        "which must give x back",
    ),
    Mutant(
        "the MLP reads x before attention was added",
        """
def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    qkv = F.linear(rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps), attn.qkv.weight)
    q, k, v = qkv.unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2)
    a = F.linear(sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v, mask).flatten(-2), attn.o.weight)
    h = rms_norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps)
    return x + a + swiglu(h, *mlp.gate_up.weight.chunk(2), mlp.down.weight)
""",
        "block with both halves",
    ),
    Mutant(
        "the MLP's norm forgotten",
        """
def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    qkv = F.linear(rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps), attn.qkv.weight)
    q, k, v = qkv.unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2)
    x = x + F.linear(sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v, mask).flatten(-2), attn.o.weight)
    return x + swiglu(x, *mlp.gate_up.weight.chunk(2), mlp.down.weight)
""",
        "only its MLP half",
    ),
    Mutant(
        "gate and up exchanged",
        """
def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    qkv = F.linear(rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps), attn.qkv.weight)
    q, k, v = qkv.unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2)
    x = x + F.linear(sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v, mask).flatten(-2), attn.o.weight)
    up, gate = mlp.gate_up.weight.chunk(2)
    return x + swiglu(rms_norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps), gate, up, mlp.down.weight)
""",
        "only its MLP half",
    ),
    Mutant(
        "eps written as a number",
        """
def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    qkv = F.linear(rms_norm(x, layer.attn_norm.weight, 1e-6), attn.qkv.weight)
    q, k, v = qkv.unflatten(-1, (-1, attn.head_dim)).split(attn.heads, -2)
    x = x + F.linear(sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v, mask).flatten(-2), attn.o.weight)
    h = rms_norm(x, layer.mlp_norm.weight, 1e-6)
    return x + swiglu(h, *mlp.gate_up.weight.chunk(2), mlp.down.weight)
""",
        "only its attention half",
    ),
    Mutant(
        "q, k and v of equal size",
        """
def block(x, cos, sin, mask, layer):
    attn, mlp = layer.attn, layer.mlp
    qkv = F.linear(rms_norm(x, layer.attn_norm.weight, layer.attn_norm.eps), attn.qkv.weight)
    q, k, v = (t.unflatten(-1, (-1, attn.head_dim)) for t in qkv.chunk(3, -1))
    x = x + F.linear(sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v, mask).flatten(-2), attn.o.weight)
    h = rms_norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps)
    return x + swiglu(h, *mlp.gate_up.weight.chunk(2), mlp.down.weight)
""",
        "block raised RuntimeError",
    ),
]
