"""`python -m minillm.bench.peers.transformers_worker`: transformers in a process of its own, so that neither engine
has the other's memory, threads or settings.

Orders come as lines of JSON on stdin, and each is answered by one line on stdout: {"ok": ...} or {"error": "..."}.
The process ends with its stdin.
"""

import json
import os
import sys
from typing import Any

import torch

from minillm.bench.harness import now
from minillm.bench.peers.in_process import generate

PAGE = 256  # tokens in a page of generate_batch's KV memory: transformers' default
ATTENTION = "sdpa"  # the one that both variants run on a CPU without further packages


def load(folder: str, dtype: str, device: str, threads: int) -> tuple[Any, str]:
    """The model, which never ends a text by itself, and the version of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
    )
    peer.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return peer.to(device).eval(), transformers.__version__


def padded(peer: Any, prompts: list[list[int]], n_new: list[int], max_running: int) -> dict[str, Any]:
    """`generate`, group after group. Each goes on until its longest text is done; a row's own part is kept."""
    outputs, first, last, wasted = [], [], [], 0
    start = now(peer.device)
    for i in range(0, len(prompts), max_running):
        group, wanted = prompts[i : i + max_running], n_new[i : i + max_running]
        offset = now(peer.device) - start
        made, stamps = generate(peer, group, max(wanted))
        outputs += [output[:n] for output, n in zip(made, wanted, strict=True)]
        first += [offset + stamps[0]] * len(group)
        last += [offset + stamps[n - 1] for n in wanted]
        pushed = len(group) * (max(map(len, group)) + len(stamps) - 1)  # the last token is not read
        wasted += pushed - sum(len(prompt) + n - 1 for prompt, n in zip(group, wanted, strict=True))
    return {"outputs": outputs, "first": first, "last": last, "wasted": wasted}


def continuous(peer: Any, prompts: list[list[int]], n_new: list[int], max_running: int, budget: int) -> dict[str, Any]:
    """What `generate_batch` does, with a length for each request: it has only one for all.

    Memory for all that may run at once is there from the start, as in our pool.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    longest = max(len(prompt) + n for prompt, n in zip(prompts, n_new, strict=True))
    settings = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=max_running * -(-longest // PAGE) + 1,
        max_batch_tokens=budget,
        max_requests_per_batch=max_running,
        allow_block_sharing=False,  # nothing is read from an earlier run
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # -1: no text ends by itself
    done: dict[str, Any] = {}
    with (
        torch.inference_mode(),
        peer.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=settings
        ) as manager,
    ):
        start = now(peer.device)
        names = [
            manager.add_request(prompt, max_new_tokens=n, eos_token_id=-1, record_timestamps=True)
            for prompt, n in zip(prompts, n_new, strict=True)
        ]
        while len(done) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                done[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("generate_batch's thread ended early")
    results = [done[name] for name in names]
    return {
        "outputs": [result.generated_tokens for result in results],
        "first": [result.timestamps[0] - start for result in results],
        "last": [result.timestamps[-1] - start for result in results],
        "wasted": None,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints does not get between the answers
    peer: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            match order.pop("order"):
                case "load":
                    peer, version = load(**order)
                    answer: dict[str, Any] = {"version": version, "attention": ATTENTION}
                case "generate":
                    answer = padded(peer, **order)
                case "generate_batch":
                    answer = continuous(peer, **order)
        except Exception as error:  # of any kind: it goes to the one who asked
            reason = str(error).splitlines()[0] if str(error) else ""
            print(json.dumps({"error": f"{type(error).__name__}: {reason}"}), file=answers, flush=True)
        else:
            print(json.dumps({"ok": answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
