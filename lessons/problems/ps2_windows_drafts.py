# %% [markdown]
# # Problem set 2 · A cache that forgets, and drafts that cost nothing in quality
#
# You write attention over a KV cache of fixed size, in which new tokens take the places of old ones, and you write the
# rule by which a large model takes over tokens that a small one has guessed, without changing what it says.
#
# It needs lessons 03 (a token from its probabilities and one number u), 04 (the cache) and 05 (chunks). The model is a
# random one with two layers, in float64; every cell runs in seconds. The check tells which properties hold; the marker
# runs the same properties on other inputs too, of other sizes. A property that holds counts, whether or not the others
# do. But a function that holds on the shown inputs alone gets nothing for the others.
#
# | part | properties | public checks | other inputs | written | minutes |
# |---|--:|--:|--:|--:|--:|
# | 1. `WindowAttend` | 6 | 6 points | 2.5 points | | 75 |
# | 2. `verify` | 6 | 6 points | 2.5 points | | 60 |
# | 3. Explain | | | | 3 points | 20 |
# | together | 12 | 12 points | 5 points | 3 points | 155 |

# %% tags=["setup"]
import random

import torch
from torch import Tensor

from minillm import attention, lab
from minillm.lab.tiny import TINY
from minillm.model import Llama

# %%
lab.start("p2")
model = Llama.random(TINY, seed=2, dtype=torch.float64)

# %% [markdown]
# ## Problem 1: a window in a ring
#
# Some models are trained so that a token sees only the last W positions, its own included (Mistral 7B: W = 4,096; Jiang
# et al. 2023, [arXiv 2310.06825](https://arxiv.org/abs/2310.06825)). Then K and V of older tokens are of no more use,
# and a memory of W places is enough for a text of any length: position p has place **p mod W**.
#
# Here is a memory with W = 4 while a text grows. What is new in a step stands in brackets.
#
# | after the step with positions | place 0 | place 1 | place 2 | place 3 |
# |---|--:|--:|--:|--:|
# | 0 1 2 | [0] | [1] | [2] | - |
# | 3 | 0 | 1 | 2 | [3] |
# | 4 | [4] | 1 | 2 | 3 |
# | 5 6 7 | 4 | [5] | [6] | [7] |
#
# In the last step the token at position 5 must see positions 2, 3, 4 and 5. But 2 lies where 6 belongs, and 3 where 7
# belongs. Lesson 04 said: store first, then read. Think about what that does here.
#
# Write `WindowAttend`. It is made anew for each step and called once in each layer, as `CachedAttend` in lesson 04. All
# that lasts from step to step is in the two memories. Which position lies in which place before the step, nobody tells
# you; the step's first position is enough to know it, since the text began at position 0 and left out none. A step may
# have any number of tokens, also more than W: then two of them have the same place, and the later one must stay. (Do
# not leave that to one assignment `memory[:, index] = new` whose index has a place twice. [PyTorch leaves
# open](https://pytorch.org/docs/stable/generated/torch.Tensor.index_put_.html) which value stays then.) The memories
# may come from another text: a place that this text has not written yet may hold anything, also NaN, and must not be
# read.
#
# `attention.visible(q_pos, k_pos)` and `attention.sdpa(q, k, v, mask)` are there, as in lesson 04. The mask is
# `[T, S]`, for any S keys in any order, and `sdpa` wants K and V as `[S, Hkv, D]`.


# %% task="p2.WindowAttend"
class WindowAttend:
    """Attention over the last W positions of a text, K and V in a ring. Made once per step, called once per layer.

    k_memory and v_memory [L, Hkv, W, D]; positions int64 [T] of the step's tokens, one run: 5 6 7, say
    """

    def __init__(self, k_memory: Tensor, v_memory: Tensor, positions: Tensor):
        ### BEGIN SOLUTION
        self.k_memory, self.v_memory, self.positions = k_memory, v_memory, positions
        W, start = k_memory.shape[2], int(positions[0])
        self.W = W
        place = torch.arange(W)
        held = start - 1 - (start - 1 - place) % W  # [W]: the last position before this step with p % W == place
        self.places = place[held >= 0]  # [R]: those that this text has written
        k_pos = torch.cat((held[held >= 0], positions))  # [R + T]
        self.mask = attention.visible(positions, k_pos) & (k_pos > positions[:, None] - W)  # [T, R + T]
        ### END SOLUTION

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D]; k, v [T, Hkv, D], rotated  ->  [T, H, D]. Afterwards the memories hold the last W positions."""
        ### BEGIN SOLUTION
        both = []
        for memory, new in ((self.k_memory[layer], k), (self.v_memory[layer], v)):
            both.append(torch.cat((memory[:, self.places].transpose(0, 1), new)))  # [R + T, Hkv, D], a copy
            memory[:, self.positions[-self.W :] % self.W] = new[-self.W :].transpose(0, 1)
        return attention.sdpa(q, *both, self.mask)
        ### END SOLUTION


# %%
lab.check("p2", "WindowAttend")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Attend over two things laid end to end: what the memory held *before* this step, and the step's own K and V. The mask
# compares positions, so you need the position of each of them; in which order they lie does not matter. Store last.
# </details>
#
# <details><summary>Hint 2</summary>
#
# Place j holds the largest position below `start` that leaves the remainder j. Count back from `start - 1`: by
# `(start - 1 - j) % W` positions. Where that gives a number below 0, nothing was written yet, and the place must not be
# read at all. For storing, look only at the last W of the step's tokens.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# The memory is read before it is written; `torch.cat` makes a copy, so writing afterwards is safe. Positions do all the
# rest: causality is `k_pos <= q_pos`, the window is `k_pos > q_pos - W`, and that the places are out of order makes no
# difference to a sum. The common wrong answer stores first, as in lesson 04. With one token in a step it is right, for
# the place that is overwritten held the one position that has just left the window; with a chunk, the first tokens miss
# up to T - 1 positions. The second one takes `arange(W)` for the positions of the places. The third keeps a counter in
# the object and moves it in `__call__`, which runs once for every layer.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### How far does a text see?
#
# With a window of W = 3 a token sees itself and two others. How far does the first token of a text still matter? Change
# it, run both texts through the model with your class, in chunks of 4, and look at which positions the final hidden
# states differ. The model has two layers. Guess first: for W = 3, which is the last position at which they differ?

# %%
lab.predict("p2.last_position", None)

# %% [markdown]
# Now the two texts. (The cell needs your class.)


# %%
def hidden_of(text: list[int], W: int, m: int) -> Tensor:
    """Hidden states [n, d] of a text, m tokens in a step."""
    memories = [torch.zeros(TINY.n_layers, TINY.n_kv_heads, W, TINY.head_dim, dtype=torch.float64) for _ in range(2)]
    rows = []
    for start in range(0, len(text), m):
        new = torch.tensor(text[start : start + m])
        positions = torch.arange(start, start + len(new))
        rows.append(model(new, positions, WindowAttend(*memories, positions)))
    return torch.cat(rows)


text = [random.Random(0).randrange(TINY.vocab_size) for _ in range(12)]
for W in (2, 3, 4):
    apart = (hidden_of(text, W, 4) - hidden_of([text[0] + 1, *text[1:]], W, 4)).abs().amax(-1)
    differ = (apart > 0).nonzero().flatten().tolist()
    print(f"W = {W}: positions {differ} differ; layers x (W - 1) = {TINY.n_layers * (W - 1)}")
    if W == 3:
        lab.reveal("p2.last_position", max(differ, default=0))

# %% [markdown]
# ## Problem 2: verify a draft
#
# A step of decoding reads all weights for one token (lesson 04). A chunk of n tokens reads them once as well (lesson
# 05). So let a small, fast model write n tokens ahead, the **draft**, and let the large one, the **target**, look at
# all of them in one step. The step computes the last token so far and the n drafted ones: n + 1 tokens, n + 1 rows of
# the target's own probabilities, each for the token that comes next. Where they are like the small one's, the draft can
# stay: several tokens for one step (*speculative decoding*; Leviathan, Kalman and Matias 2023, [arXiv
# 2211.17192](https://arxiv.org/abs/2211.17192); Chen et al. 2023, [arXiv
# 2302.01318](https://arxiv.org/abs/2302.01318)).
#
# The rule below keeps exactly the target's distribution: nobody can tell from the texts that there was a draft. Row i
# of q is what the draft model said before it drew `draft[i]` from it; row i of p is what the target says at the same
# place. p has one row more, for the place after the whole draft. For i = 0, 1, 2, ... with x = draft[i]:
#
# - x **stays** if `u[i] < p[i, x] / q[i, x]`, where `u[i]` in [0, 1) is this token's own random number. (So x always
#   stays where the target likes it at least as well as the draft model did.)
# - The first x that does not stay is **replaced**, and everything drafted after it is dropped. The token in its place
#   is drawn from what is left of p where q is taken off: weights `max(p[i] - q[i], 0)`, for all V tokens.
# - If the whole draft stays, **one more** token is drawn from the last row of p.
#
# Whichever happens, one token is drawn at the end, and the number w in [0, 1) draws it as in lesson 03: lay the weights
# end to end in the order of ids, stretch w over their sum, and take the token in whose stretch it falls. A stretch
# holds its left end and not its right one.
#
# | example, V = 3 | token 0 | token 1 | token 2 |
# |---|--:|--:|--:|
# | p | 0.5 | 0.4 | 0.1 |
# | q | 0.3 | 0.1 | 0.6 |
# | stays with probability | 1 | 1 | 1/6 |
# | weights if it does not stay | 0.2 | 0.3 | 0 |
#
# Token 2 is drafted with 0.6, and stays in one of six cases: 0.1, as p says. In the other five, 0.5 in all, token 0
# comes with 2/5 of that and token 1 with 3/5: 0.3 + 0.2 = 0.5, and 0.1 + 0.3 = 0.4, as p says.


# %% task="p2.verify"
def verify(p: Tensor, q: Tensor, draft: list[int], u: list[float], w: float) -> list[int]:
    """The tokens of this step: what stays of the draft, and one more; 1 to n + 1 ids, as Python ints.

    p float64 [n + 1, V] the target's probabilities, q float64 [n, V] those of the draft model; each row sums to 1.
    draft: n ids, perhaps none, drawn from the rows of q (so q[i, draft[i]] > 0); u: n numbers; w: one, all in [0, 1).
    """
    ### BEGIN SOLUTION
    kept, weights = len(draft), p[-1]
    for i, x in enumerate(draft):
        if not u[i] * q[i, x] < p[i, x]:
            kept, weights = i, (p[i] - q[i]).clamp(min=0)  # [V]
            break
    running = weights.cumsum(0)
    return [*draft[:kept], int(torch.searchsorted(running, w * running[-1], right=True))]
    ### END SOLUTION


# %%
lab.check("p2", "verify")

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# One loop over the draft finds how many tokens stay. After it there is one draw, in either case. Only the weights that
# it draws from depend on how the loop ended.
# </details>
#
# <details><summary>Hint 2</summary>
#
# `u * q < p` needs no division. At u = 0 and p = 0 it is false, as it must be. The weights that are left do not sum to
# 1: multiply w by the last entry of their running sum. `torch.searchsorted(running, value, right=True)` finds the first
# entry above the value.
# </details>
#
# <!-- BEGIN SOLUTION -->
# <details><summary>Worked explanation</summary>
#
# A token x comes in two ways: drafted and kept, with probability q(x) · min(1, p(x)/q(x)) = min(p(x), q(x)); or as a
# replacement. Something is replaced with probability 1 - sum of min(p, q), which is just the sum of max(p - q, 0), so
# the replacement is x with max(p(x) - q(x), 0). The two add up to p(x). The common wrong answer draws the replacement
# from p itself: then what both models like comes too often. It looks right in every single case. The next common one
# goes on after a replacement, with tokens that were drafted after another word.
# </details>
# <!-- END SOLUTION -->

# %% [markdown]
# ### What a draft buys
#
# Let the draft model be a mixture: with share a it says what the target says, else anything at all. If a drafted token
# stays with probability s, then n drafted tokens give (1 - s^(n + 1)) / (1 - s) tokens for each step of the target. And
# s is the sum of min(p, q) over all tokens, which is how much of the two distributions lies on top of each other. The
# last column says how far the first tokens are from p: no further than 2,000 draws from p itself, which come to about
# 0.01 to 0.02. (The cell needs your function.)

# %%
V, n, runs = 8, 4, 2000
draw = random.Random(1)
p_row = torch.rand(V, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
p_row /= p_row.sum()
print("share a   stays (s)   tokens a step: predicted, counted   first token, furthest from p")
for share in (0.0, 0.5, 0.8, 1.0):
    q_row = share * p_row + (1 - share) / V
    s = float(torch.minimum(p_row, q_row).sum())
    p, q, made, first = p_row.expand(n + 1, V), q_row.expand(n, V), 0, torch.zeros(V, dtype=torch.float64)
    for _ in range(runs):
        tokens = verify(
            p, q, draw.choices(range(V), q_row.tolist(), k=n), [draw.random() for _ in range(n)], draw.random()
        )
        made += len(tokens)
        first[tokens[0]] += 1 / runs
    said = sum(s**i for i in range(n + 1))
    print(f"{share:>7}{s:>12.3f}{said:>26.2f}{made / runs:>9.2f}{(first - p_row).abs().max():>26.3f}")

# %% [markdown]
# ## Explain
#
# Write between the quotes, in eight to ten sentences. You use a draft of n tokens in an engine: one step of the target
# computes the last token at position c and the draft at c + 1 .. c + n, and stores their K and V. Then `verify` keeps j
# of the drafted tokens, j < n, and the token that comes after them is not computed yet.
#
# 1. With the **full** cache of lesson 04: what must be done to the memories, and what to the count of computed tokens,
#    so that the next step is right? Why is that enough?
# 2. With the **ring** of problem 1, W places: what has been lost, and is it needed again?
# 3. Name one way to make drafts work with a ring, and what it costs.

# %%
lab.answer("p2.why", """ """)

# %% [markdown]
# <!-- BEGIN SOLUTION -->
# <details><summary>A good answer</summary>
#
# With the full cache nothing is done to the memories. The count of computed tokens goes back to c + j + 1: positions 0
# to c + j. K and V of the kept tokens are right, since they depend on nothing after them; what lies behind c + j is
# never looked at (positions beyond the query's own are hidden), and the next step writes its own K and V over it before
# anybody reads there. In the ring the n + 1 tokens of the step took the places of positions c - W .. c - W + n. The
# next token stands at c + j + 1 and must see from c + j - W + 2 on; so positions c + j - W + 2 to c + n - W are needed
# again and are gone, n - j - 1 of them. Ways out: a ring of W + n places, in which the draft overwrites only what is
# outside every window, for n more places of K and V; or to hold back the draft's K and V in a place of their own until
# `verify` has decided, and store only what stays; or to save what is overwritten and put it back.
# </details>
# <!-- END SOLUTION -->
