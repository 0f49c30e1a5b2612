"""`minillm load` and guidellm, which is another project's, on the same scripted server: do their medians agree?

By hand, since guidellm is no dependency of this project, and timing is not for a test:

    python -m venv elsewhere && elsewhere/bin/pip install guidellm==0.8.1
    python tests/load_against_peer.py elsewhere/bin/guidellm weights/smollm2-135m-instruct [CASE ...]

Each client loads `tests/scripted_server.py` by turns, with as many requests, clients and tokens, and the server says
when it really wrote what (its timers are up to a millisecond late). The exit code is 1 if a median of `minillm load` is
more than 5 % from the server's or from guidellm's.

guidellm's words for it: its ITL is our tpot, (e2el - ttft) / (n_out - 1) of each request; its TPOT is e2el / n_out,
the first token's time included. Its tokenizer makes prompts only: outputs are counted by the server's usage.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
REQUESTS, CLIENTS, TOKENS, ROUNDS, WITHIN = 80, 8, 32, 3, 0.05
CASES = {"fixed": (50, 10, 0.0), "jittered": (50, 10, 0.5), "slower": (200, 25, 0.3)}  # ttft and itl in ms, jitter
Medians = tuple[float, float]  # ttft and tpot in ms


def start(ttft: float, itl: float, jitter: float) -> tuple[subprocess.Popen[str], str]:
    given = ["--ttft", str(ttft), "--itl", str(itl), "--jitter", str(jitter)]
    server = subprocess.Popen(
        [sys.executable, str(HERE / "scripted_server.py"), *given], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout
    return server, server.stdout.readline().strip()


def truth(url: str) -> Medians:
    """Of the requests since it was asked last."""
    with urllib.request.urlopen(f"{url}/truth") as page:
        pairs = json.load(page)
    return tuple(median(column) * 1e3 for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)


def minillm(url: str, folder: Path) -> Medians:
    path = folder / "minillm.json"
    asked = ["--clients", CLIENTS, "--requests", REQUESTS, "--max-tokens", TOKENS, "--warmup", 0, "--json", path]
    call([sys.executable, "-m", "minillm", "load", url, *asked])
    [row] = json.loads(path.read_text())["sections"]["load"]["rows"]
    return row["ttft"]["median"] * 1e3, row["tpot"]["median"] * 1e3


def guidellm(program: str, tokenizer: str, url: str, folder: Path) -> Medians:
    path = folder / "guidellm.json"
    asked: dict[str, Any] = {
        "--backend": f"kind=openai_http,target={url}",
        "--profile": f"kind=concurrent,streams={CLIENTS}",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--data": f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}",
        "--tokenizer": f"kind=hf_auto,model={tokenizer}",
        "--output": f"kind=json,path={path}",
    }
    call([program, "run", *(word for pair in asked.items() for word in pair), "--disable-console"])
    [benchmark] = json.loads(path.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    ttft, tpot = metrics["time_to_first_token_ms"], metrics["inter_token_latency_ms"]
    return ttft["successful"]["median"], tpot["successful"]["median"]


def call(words: list[Any]) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=HERE.parent)
    if done.returncode:
        sys.exit(f"{words[0]} failed:\n{done.stdout}{done.stderr}")


def compare(name: str, program: str, tokenizer: str) -> bool:
    ttft, itl, jitter = CASES[name]
    server, url = start(ttft, itl, jitter)
    ours, peers, truths = [], [], []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(ROUNDS):
                truth(url)
                ours.append(minillm(url, Path(folder)))
                truths.append(truth(url))
                peers.append(guidellm(program, tokenizer, url, Path(folder)))
    finally:
        server.terminate()
        server.wait()
    print(f"{name}: ttft {ttft} ms, itl {itl} ms, jitter {jitter:.0%}; medians of {ROUNDS} rounds")
    agree = True
    for i, metric in enumerate(("ttft", "tpot")):
        real, mine, other = (median(found[i] for found in row) for row in (truths, ours, peers))
        apart = mine / real - 1, mine / other - 1
        agree &= all(abs(share) <= WITHIN for share in apart)
        print(
            f"  {metric}: the server wrote {real:7.2f} ms, minillm load {mine:7.2f} ({apart[0]:+.1%}), "
            f"guidellm {other:7.2f} (minillm {apart[1]:+.1%} of it)"
        )
    return agree


if __name__ == "__main__":
    if len(sys.argv) < 3 or not set(sys.argv[3:]) <= set(CASES):
        sys.exit(__doc__)
    verdicts = [compare(name, *sys.argv[1:3]) for name in sys.argv[3:] or CASES]
    print("all within 5 %" if all(verdicts) else "NOT within 5 %")
    sys.exit(0 if all(verdicts) else 1)
