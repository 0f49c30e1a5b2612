"""Other engines on the same weights: what is asked of them, and what they answer.

base               what every peer offers           compare       rounds, rows, tables
transformers_peer  talks to transformers_worker     in_process    transformers in this process (for `claims`)
llama_bench        llama.cpp's program              gguf_file     our weights as it wants them
http_peer          any OpenAI-compatible server
"""

from minillm.bench.peers.in_process import from_llama, generate

__all__ = ["from_llama", "generate"]
