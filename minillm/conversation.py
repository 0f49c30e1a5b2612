"""`minillm chat`: a conversation, kept inside the context; each answer is one request on the whole of it."""

import io
import sys

from minillm.config import Config
from minillm.errors import InputError
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Request, make_request
from minillm.stages import kernels
from minillm.terminal import complain, remark, write
from minillm.tokenizer import Tokenizer


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Conversation:
    """The messages so far, and the request that asks for the next answer."""

    def __init__(self, tokenizer: Tokenizer, config: Config, system: str | None, params: SamplingParams):
        """Raises InputError for a checkpoint without chat template, and a system message that cannot fit."""
        self.tokenizer, self.config, self.params = tokenizer, config, params
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []  # user, assistant, user, assistant ...
        self._fit([], user("?"))

    def ask(self, text: str) -> tuple[Request, str]:
        """The request for an answer to `text`, and a line that says what was dropped to make room, or "".

        Raises InputError, and changes nothing, for a message that cannot be answered.
        """
        turns, ids, wanted = self._fit(self.turns, user(text))
        request = make_request(ids, self.params, self.config, self.tokenizer, self.config.context)
        n_dropped = (len(self.turns) - len(turns)) // 2
        self.turns = turns
        if not n_dropped:
            return request, ""
        oldest = f"the oldest {n_dropped} of its questions and answers"
        return request, f"the conversation has {wanted} tokens, but {self._room()}; {oldest} were dropped"

    def answered(self, question: str, answer: str) -> None:
        self.turns += [*user(question), {"role": "assistant", "content": answer}]

    def _fit(
        self, turns: list[dict[str, str]], message: list[dict[str, str]]
    ) -> tuple[list[dict[str, str]], list[int], int]:
        """The latest turns that fit beside `message` and its answer; their ids; the number of all ids."""
        wanted = 0
        while True:
            ids = self.tokenizer.encode_chat([*self.system, *turns, *message])
            wanted = wanted or len(ids)
            if len(ids) <= self.config.context - self._reserved:
                return turns, ids, wanted
            if not turns:
                raise InputError(f"the message has {len(ids)} tokens, but {self._room()}; shorten it")
            turns = turns[2:]

    @property
    def _reserved(self) -> int:
        """Tokens of the context kept free for an answer."""
        return min(self.params.max_tokens, self.config.context // 2)

    def _room(self) -> str:
        context, reserved = self.config.context, self._reserved
        return f"the context of {context} leaves room for {context - reserved} beside an answer of {reserved}"


def converse(llama: Llama, conversation: Conversation, backend: str = "auto") -> int:
    """Reads messages and writes answers until the end. Returns the exit code."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # what is not UTF-8 comes as far as the tokenizer, whose error ends the turn and not the conversation
        sys.stdin.reconfigure(errors="surrogateescape")
    interrupted = False  # by the key just before
    while True:
        try:
            text = read_message()
            if text is None or text in ("/quit", "/exit"):
                return 0
            interrupted = False
            if text == "/reset":
                conversation.turns = []
                remark("the conversation is forgotten")
            elif text.startswith("/") and text[1:].isalpha():
                raise InputError(f"{text} is not a command; there are /reset and /quit")
            elif text:
                answer(llama, conversation, text, backend)
        except InputError as error:
            complain(str(error))
        except KeyboardInterrupt:
            if interrupted:
                return 130
            interrupted = True
            remark("stopped; Ctrl-C again or /quit ends")


def answer(llama: Llama, conversation: Conversation, text: str, backend: str) -> None:
    """One turn. An answer that was stopped stays in the conversation as far as it came."""
    request, dropped = conversation.ask(text)
    if dropped:
        remark(dropped)
    reply = ""
    try:
        for event in kernels.generate(llama, [request], max_running=1, backend=backend):
            reply += event.text
            write(event.text)
    finally:
        write("\n")
        conversation.answered(text, reply)
    if request.finish_reason == "error":
        complain("the model's logits were not numbers; try --dtype float32")


def read_message() -> str | None:
    """A line from the keyboard, or from a pipe or file without a prompt; None at the end."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401  # gives input() its editing and history

    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
