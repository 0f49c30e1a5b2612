"""The model of the lessons' checks: a Llama so small that a check runs it some thousand times."""

from minillm.config import Config

TINY = Config(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    norm_eps=1e-5,
    rope_theta=10000.0,
    context=256,
    tied=True,
    eos=(1,),
)
