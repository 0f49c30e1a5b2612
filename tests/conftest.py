"""Fixtures that every test may use. Nothing here needs a network or a GPU."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

from minillm.config import Config
from minillm.errors import InputError
from minillm.fetch import find
from minillm.model import Llama

# the tests' tensors are small: more threads would only wait for each other
torch.set_num_threads(1)

hypothesis.settings.register_profile("test", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))

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


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is measured or compiled for a user is not for the tests, nor theirs for the user."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny() -> Llama:
    """A random Llama in float64, where every stage must make the same tokens exactly."""
    return Llama.random(TINY, seed=0, dtype=torch.float64)


@pytest.fixture(scope="session")
def real_weights() -> Path:
    try:
        return find("smollm2-135m-instruct")
    except InputError:
        pytest.skip("the real weights are not here; `make weights` fetches them")
