"""The ladder: the same texts, each stage a small change from the one before it.

Every stage is a `Generate`: it takes requests, timed or not, and yields an Event for each token as it is made.
"""

from collections.abc import Callable, Iterator

from minillm.request import Event
from minillm.stages import cached, chunked, continuous, dynamic, kernels, naive, padded, paged, ragged, shared

Generate = Callable[..., Iterator[Event]]  # (model, requests, and the limits that the stage knows)

STAGES: dict[str, Generate] = {
    "naive": naive.generate,
    "cached": cached.generate,
    "chunked": chunked.generate,
    "padded": padded.generate,
    "dynamic": dynamic.generate,
    "ragged": ragged.generate,
    "continuous": continuous.generate,
    "paged": paged.generate,
    "shared": shared.generate,
    "kernels": kernels.generate,
}
