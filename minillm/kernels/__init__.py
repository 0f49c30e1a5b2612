"""Ways to compute the same attention over a pool of slots: `BACKENDS`, each an Attend built once per step."""

from importlib import import_module
from typing import Protocol

from minillm.attention import Attend
from minillm.batch import Batch
from minillm.cache import KVPool
from minillm.errors import InputError
from minillm.model import Llama

# name -> "module:class", imported when asked for
BACKENDS = {
    "dense": "minillm.kernels.dense:DenseAttend",
    "gather": "minillm.kernels.gather:GatherAttend",
    "segments": "minillm.kernels.segments:SegmentsAttend",
    "flex": "minillm.kernels.flex:FlexAttend",
    "varlen": "minillm.kernels.varlen:VarlenAttend",
    "triton_paged": "minillm.kernels.triton_paged:TritonPagedAttend",
    "c_paged": "minillm.kernels.c_paged:CPagedAttend",
}


class Backend(Protocol):
    """A class of Attends: built over the pool for one step, then called once per layer."""

    def __call__(self, pool: KVPool, batch: Batch) -> Attend: ...


def backend(name: str) -> Backend:
    """The Attend class of that name. Raises InputError if there is none."""
    if name not in BACKENDS:
        raise InputError(f"backend {name!r} is not known; use one of {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    return getattr(import_module(module), attribute)


def why_not(name: str, model: Llama) -> str | None:
    """What keeps this backend from running this model on this machine, in words; None: nothing.

    A backend that not every machine, device or dtype can run has a static method `why_not(model)` that says so.
    Raises InputError for an unknown name.
    """
    ask = getattr(backend(name), "why_not", None)
    return None if ask is None else ask(model)
