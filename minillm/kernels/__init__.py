"""Ways to compute the same attention over a pool of slots: `BACKENDS`, each an Attend built once per step."""

from collections.abc import Callable
from importlib import import_module

from minillm.attention import Attend
from minillm.batch import Batch
from minillm.cache import KVPool
from minillm.errors import InputError

# name -> "module:class", imported when asked for
BACKENDS = {
    "dense": "minillm.kernels.dense:DenseAttend",
    "gather": "minillm.kernels.gather:GatherAttend",
}


def backend(name: str) -> Callable[[KVPool, Batch], Attend]:
    """The Attend class of that name. Raises InputError if there is none."""
    if name not in BACKENDS:
        raise InputError(f"backend {name!r} is not known; use one of {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    return getattr(import_module(module), attribute)
