"""What the soak's clients ask, and whether an answer is right: in form, and for some, letter by letter."""

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from soak_wire import Wire, Wrong, post

NEAR_TIE = 0.002  # in log-probability: nearer than that, rounding decides between two tokens
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = "river stone light market paper winter engine garden letter number story window copper morning sail".split()
BEGINNINGS = [" ".join(random.Random(i).choices(WORDS, k=10 * i)) for i in range(1, 7)]
QUESTIONS = (
    "Name three colours and say what they remind you of.",
    "Why is the sky blue? Answer in two sentences.",
    "Write a short letter to a friend about the winter.",
)


@dataclass
class Text:
    """One choice of an answer."""

    text: str = ""
    reason: str | None = None
    tokens: list[str] = field(default_factory=list)  # those with log-probabilities
    margins: list[float] = field(default_factory=list)  # from each token to the best other one


@dataclass
class Answer:
    texts: list[Text]
    usage: dict[str, int] | None = None


@dataclass
class Ask:
    """A request, and, if it is asked again and again, what the server made of it when it had nothing else to do."""

    path: str
    fields: dict[str, Any]
    expected: Answer | None = None

    @property
    def n(self) -> int:
        return int(self.fields.get("n") or 1)

    @property
    def data(self) -> bytes:
        return post(self.path, self.fields)

    @property
    def streams(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def is_greedy(self) -> bool:
        return self.fields["temperature"] == 0

    def varied(self, draw: random.Random, stream: bool | None = None) -> "Ask":
        """The same question in another form, which must not change the text."""
        fields = self.fields | {"stream": draw.random() < 0.6 if stream is None else stream}
        if fields["stream"] and draw.random() < 0.5:
            fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": draw.random() < 0.3}
        if draw.random() < 0.3:
            fields |= with_logprobs(self.path, draw.randint(0, 5))
        return Ask(self.path, fields, self.expected)


def with_logprobs(path: str, n: int) -> dict[str, Any]:
    return {"logprobs": n} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": n}


def question(model: str, path: str, words: str, beginning: str = "", **fields: Any) -> Ask:
    system = [{"role": "system", "content": beginning}] if beginning else []
    prompt = {"prompt": f"{beginning} {words}".strip()}
    asked = {"messages": [*system, {"role": "user", "content": words}]} if path == CHAT else prompt
    return Ask(path, {"model": model, **asked, **fields})


def known_asks(model: str) -> list[Ask]:
    """Those whose text the idle server gives first. End tokens are left out, so that all have a margin everywhere."""
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    seeded: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "ignore_eos": True}
    asks = [
        question(model, path, words, BEGINNINGS[i], max_tokens=8 + 6 * i, **greedy)
        for i, words in enumerate(QUESTIONS)
        for path in (CHAT, COMPLETIONS)
    ]
    asks.append(question(model, COMPLETIONS, "One, two, three,", max_tokens=30, stop=["ten", "\n"], **greedy))
    asks.append(question(model, CHAT, QUESTIONS[0], BEGINNINGS[4], max_tokens=12, n=2, **greedy))
    asks.append(question(model, CHAT, QUESTIONS[2], max_tokens=16, n=2, **seeded))
    asks.append(question(model, COMPLETIONS, "The history of the", BEGINNINGS[3], max_tokens=16, **seeded))
    return asks


def random_ask(model: str, draw: random.Random) -> Ask:
    path = draw.choice((CHAT, COMPLETIONS))
    fields: dict[str, Any] = {
        "max_tokens": draw.choice((1, 2, 8, 16, 24, 48)),
        "temperature": draw.choice((0, 0.7, 1.0)),
        "top_k": draw.choice((-1, 5, 40)),
        "n": draw.choice((1, 1, 1, 1, 2, 3)),
        "stream": draw.random() < 0.6,
    }
    if draw.random() < 0.3:
        fields["stop"] = draw.choice((" the", ["\n", "."], ["e", "zzz"], "never in any text"))
    if draw.random() < 0.2:
        fields |= with_logprobs(path, draw.choice((0, 1, 5, 20)))
    if draw.random() < 0.2:
        fields |= {"ignore_eos": True, "min_tokens": fields["max_tokens"] // 2}
    if draw.random() < 0.2:
        fields |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"5": -10}}
    if fields["stream"] and draw.random() < 0.4:
        fields["stream_options"] = {"include_usage": True}
    beginning = draw.choice(BEGINNINGS) if draw.random() < 0.6 else ""
    return question(model, path, " ".join(draw.choices(WORDS, k=draw.randint(1, 30))), beginning, **fields)


def long_ask(model: str, draw: random.Random) -> Ask:
    """A stream of about 2 kB a token."""
    fields: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "ignore_eos": True, "stream": True}
    return question(model, CHAT, draw.choice(QUESTIONS), **fields, **with_logprobs(CHAT, 20))


# ---- reading


async def read(wire: Wire, ask: Ask) -> Answer:
    """The answer of status 200. Raises Wrong."""
    return await read_stream(wire.sse(), ask) if ask.streams else read_whole(await wire.json(), ask)


def read_whole(body: dict[str, Any], ask: Ask) -> Answer:
    answer = Answer([Text() for _ in range(ask.n)], body["usage"])
    if [choice["index"] for choice in body["choices"]] != list(range(ask.n)):
        raise Wrong(f"asked for {ask.n} choices, got {[choice['index'] for choice in body['choices']]}")
    for choice in body["choices"]:
        add(answer, choice, choice["message"]["content"] if ask.path == CHAT else choice["text"])
    return answer


async def read_stream(chunks: AsyncIterator[dict[str, Any]], ask: Ask) -> Answer:
    answer = Answer([Text() for _ in range(ask.n)])
    async for chunk in chunks:
        if "error" in chunk:
            raise Wrong(f"an error in a stream: {chunk['error']}")
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk["choices"]:
            if answer.texts[choice["index"]].reason is not None:
                raise Wrong("a choice goes on after its end")
            add(answer, choice, choice["delta"].get("content") or "" if ask.path == CHAT else choice["text"])
    return answer


def add(answer: Answer, choice: dict[str, Any], text: str) -> None:
    it = answer.texts[choice["index"]]
    it.text += text
    it.reason = choice["finish_reason"]
    if (logprobs := choice.get("logprobs")) is None:
        return
    if "content" in logprobs:  # of a chat
        rows = [
            (one["token"], one["logprob"], {top["token"]: top["logprob"] for top in one["top_logprobs"]})
            for one in logprobs["content"]
        ]
    else:
        rows = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
    for token, logprob, top in rows:
        it.tokens.append(token)
        others = [other for name, other in top.items() if name != token]
        it.margins.append(logprob - max(others) if others else float("inf"))


# ---- judging


def check(ask: Ask, answer: Answer) -> None:
    """Raises Wrong for a form that cannot be."""
    fields, most = ask.fields, ask.fields["max_tokens"]
    stops = [fields["stop"]] if isinstance(fields.get("stop"), str) else fields.get("stop") or []
    for it in answer.texts:
        if it.reason not in ("stop", "length"):
            raise Wrong(f"a text ended with {it.reason}")
        if "logprobs" in fields and not (1 <= len(it.tokens) <= most):
            raise Wrong(f"{len(it.tokens)} tokens with log-probabilities, of {most} at most")
        if "min_tokens" not in fields and (found := [stop for stop in stops if stop in it.text]):
            raise Wrong(f"the stop string {found[0]!r} is in the text")
    if answer.usage is None:
        if not ask.streams or fields.get("stream_options", {}).get("include_usage"):
            raise Wrong("there is no usage")
        return
    made, all_length = answer.usage["completion_tokens"], all(it.reason == "length" for it in answer.texts)
    if not ask.n <= made <= ask.n * most or (all_length and made != ask.n * most):
        raise Wrong(f"{made} tokens were counted, of {ask.n} x {most}")


def same(ask: Ask, answer: Answer) -> bool:
    """Whether the texts are those of the idle server. Raises Wrong if a greedy one parts where no rounding decides."""
    assert ask.expected is not None
    equal = True
    for it, was in zip(answer.texts, ask.expected.texts, strict=True):
        if (it.text, it.reason) == (was.text, was.reason):
            continue
        equal = False
        place, margin = parting(it.text, was)
        if ask.is_greedy and margin > NEAR_TIE:
            raise Wrong(f"{it.text!r} ({it.reason}) parts from the idle server's {was.text!r} at {place}, by {margin}")
    return equal


def parting(text: str, was: Text) -> tuple[int, float]:
    """The character where a text parts from the known one, and how near the known token's rival was there."""
    pairs = zip(text, was.text, strict=False)
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(text), len(was.text)))
    end = 0
    for token, margin in zip(was.tokens, was.margins, strict=True):
        end += len(token)
        if end > place:
            return place, margin
    return place, was.margins[-1]
