"""Sharing measured: counts by hand, the same tokens with and without it, wrong texts, refusals, Ctrl-C, the file."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from minillm.bench import sharing, sharing_report
from minillm.bench.harness import Job
from minillm.bench.sharing import (
    KINDS,
    Answer,
    Plan,
    Result,
    ask,
    make_engine,
    measure,
    measure_questions,
    measure_samples,
)
from minillm.bench.verify import Verifier
from minillm.bench.workload import QUICK, Workload, random_workload
from minillm.engine import Engine
from minillm.errors import InputError
from minillm.model import Llama
from minillm.request import Request
from minillm.sharing import Entry, SharedSlots

PLAN = Plan(
    samples=3,
    prompt=20,
    new=6,
    system=40,
    questions=3,
    question=5,
    short=2,
    turns=3,
    answer=4,
    distinct=6,
    length=10,
    output=3,
    block=4,
    rounds=2,
)
WORK = random_workload(QUICK, TINY)


def silent(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def result(tiny: Llama) -> Result:
    return measure(tiny, "tiny", WORK, silent(), PLAN)


# ---- counts


def test_samples_by_hand(result: Result):
    """20 + 6 - 1 tokens are 7 blocks of 4; the prompt's 5 are held once, 2 further ones by each sample."""
    assert result.samples is not None
    assert {kind: max(held) for kind, held in result.samples.held.items()} == {"paged": 3 * 7, "shared": 5 + 3 * 2}
    assert result.samples.held["shared"] == [
        5,
        8,
        8,
        8,
        8,
        11,
    ]  # the prompt; then a token each; the fifth fills a block
    assert result.samples.share == 11 / 21
    assert result.samples.found == sharing.Found(asked=60, found=40, saved=10)


def test_questions_by_hand(result: Result):
    """Two of three find the 40 tokens before their 5."""
    assert result.questions is not None and result.questions.void is None
    assert result.questions.found == sharing.Found(asked=3 * 45, found=2 * 40, saved=20)
    assert all(len(values) == 3 for values in result.questions.by_number.values())


def test_a_chat_finds_all_full_blocks_of_the_turn_before(result: Result):
    """All that was computed in it: its prompt, and its answer but for the last token, which was never fed back."""
    assert result.chat is not None and result.chat.void is None
    turns = result.chat.turns
    assert turns[0].prompt == 5 and turns[0].found == 0
    for before, turn in zip(turns, turns[1:], strict=False):
        assert turn.prompt == before.prompt + before.new + 5
        assert turn.found == (before.prompt + before.new - 1) // 4 * 4
    assert result.chat.found.found == sum(turn.found for turn in turns)
    assert result.chat.found.asked == sum(turn.prompt for turn in turns)


def test_prompts_that_share_nothing_find_nothing(result: Result):
    assert result.distinct is not None and result.distinct.void is None
    assert result.distinct.found == sharing.Found(asked=60, found=0, saved=0)


def test_what_is_found_is_not_computed(tiny: Llama):
    """Counted from outside: tokens that went through the model, and those that were found, are all there are."""
    pushed: list[int] = []
    hook = tiny.register_forward_pre_hook(lambda _, args: pushed.append(args[0].numel()))
    try:
        engine = make_engine(tiny, "shared", 1, 60, 4, 3)
        answers = [ask(engine, Job(tuple(WORK.text[:n]), 5)) for n in (30, 40, 20)]
    finally:
        hook.remove()
    assert [answer.found for answer in answers] == [0, 28, 16]  # of 30 + 5 - 1 computed; never its last token
    assert sum(pushed) == (30 + 4) + (40 + 4 - 28) + (20 + 4 - 16)
    assert all(answer.ttft > 0 and len(answer.output) == 5 for answer in answers)


def test_the_targets_on_memory_hold(tiny: Llama):
    """Counts: the same with any model that has room for them."""
    model = Llama.random(dataclasses.replace(TINY, context=1100), dtype=torch.float64)
    plan, text = Plan(rounds=1), random_workload(QUICK, TINY).text
    found = measure_samples(model, text, plan, lambda _: None)
    assert {kind: max(held) for kind, held in found.held.items()} == {"paged": 8 * 36, "shared": 32 + 8 * 4}
    assert found.share <= 0.25 and found.same_texts == 8
    again = measure_questions(model, text, plan, Verifier(model), lambda _: None)
    assert again.void is None and again.found.found == 5 * 992  # 62 blocks of 16, of a system prompt of 1,000 tokens


# ---- times


def test_ratios_by_hand(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    """A second for each token of a prompt that was not found: 45 for a question, 5 behind the system prompt."""

    def timed(engine: Engine, job: Job) -> Answer:
        right = ask(engine, job)
        return dataclasses.replace(right, ttft=float(len(job.prompt) - right.found))

    monkeypatch.setattr(sharing, "ask", timed)
    found = measure(tiny, "tiny", WORK, silent(), PLAN)
    assert found.questions and found.chat
    assert [found.questions.first[kind].median for kind in KINDS] == [45, 45]
    assert [found.questions.later[kind].median for kind in KINDS] == [45, 5] and found.questions.ratio == 9
    assert found.questions.later["shared"].most == 5  # the first is not among them
    assert found.questions.by_number == {"paged": [45, 45, 45], "shared": [45, 5, 5]}
    for turn in found.chat.turns:
        assert turn.ttft == {"paged": turn.prompt, "shared": turn.prompt - turn.found}
    later = found.chat.turns[1:]
    assert found.chat.ratio == sum(t.prompt for t in later) / sum(t.prompt - t.found for t in later)


def test_ratios_are_those_of_the_rounds(tiny: Llama):
    found = measure(tiny, "tiny", WORK, silent(), dataclasses.replace(PLAN, rounds=1))
    assert found.samples and found.distinct
    slow, fast = (found.samples.seconds[kind].median for kind in KINDS)
    assert found.samples.ratio == slow / fast
    before, after = (found.distinct.output_throughput[kind].median for kind in KINDS)
    assert found.distinct.ratio == after / before


# ---- the same tokens


@settings(max_examples=20)
@given(st.integers(2, 6), st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 2, 4, 16]))
def test_samples_are_the_same_with_and_without_sharing(tiny: Llama, samples: int, prompt: int, new: int, block: int):
    plan = Plan(samples=samples, prompt=prompt, new=new, block=block, rounds=1)
    found = measure_samples(tiny, WORK.text, plan, lambda _: None)
    assert found.same_texts == samples
    assert found.share <= 1 and found.found.found == (samples - 1) * prompt


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=6))
def test_answers_are_the_same_with_and_without_sharing(tiny: Llama, sizes: list[tuple[int, int, int]]):
    """Prompts that begin alike for a while and go on differently."""
    jobs = [Job((*WORK.text[:n], *WORK.text[100 + i : 100 + i + more]), new) for i, (n, more, new) in enumerate(sizes)]
    told: dict[str, list[list[int]]] = {}
    for kind in KINDS:
        engine = make_engine(tiny, kind, 1, 60, 4, 2)
        told[kind] = [ask(engine, job).output for job in jobs]
    assert told["paged"] == told["shared"]


def test_texts_of_another_prompt_are_void(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    """A search that takes whatever blocks there are for the ones it looks for."""

    def wrong(self: SharedSlots, request: Request) -> list[Entry]:
        first = next((entry for entry in self.index.values() if entry.parent is None), None)
        return [first] if first and len(request.tokens) > self.size else []

    monkeypatch.setattr(SharedSlots, "_lookup", wrong)
    many = dataclasses.replace(PLAN, distinct=12)  # more than fit into the first step
    found = measure(tiny, "tiny", WORK, silent(), many)
    assert list(found.void) == ["distinct"]  # in the others it is the right block, as it happens
    console = silent()
    sharing_report.show(found, console)
    assert "distinct is void" in written(console) and "share nothing" not in sharing_report.finding(found)
    sharing_report.plot(found)


def test_a_wrong_answer_is_void(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    def wrong(engine: Engine, job: Job) -> Answer:
        right = ask(engine, job)
        return dataclasses.replace(right, output=[right.output[0] ^ 2, *right.output[1:]])

    monkeypatch.setattr(sharing, "ask", wrong)
    found = measure(tiny, "tiny", WORK, silent(), PLAN)
    assert list(found.void) == ["questions", "chat"]
    console = silent()
    sharing_report.show(found, console)
    sharing_report.plot(found)
    assert "questions is void" in written(console) and sharing_report.alt_text(found).count("void") == 2


# ---- what is refused


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"samples": 1}, "samples is 1; it must be from 2 to 64"),
        ({"questions": 1}, "questions is 1; it must be from 2"),
        ({"turns": 9}, "turns is 9; it must be from 2 to 8"),
        ({"block": 0}, "block is 0; it must be from 1"),
        ({"rounds": 0}, "rounds is 0"),
        ({"prompt": 251}, "prompt is 251 tokens; the model's context is 256, so it may have 250"),
        ({"system": 250}, "system is 250 tokens; the model's context is 256, so it may have 249"),
        ({"answer": 60}, "turns is 3; the chat may need 375 tokens, and has room for 256"),
        ({"distinct": 1000, "length": 17}, "distinct is 1000, which takes 17000 tokens of text; there are 16000 in"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(asked: dict, why: str):
    with pytest.raises(InputError, match=why):
        dataclasses.replace(PLAN, **asked).check(TINY, WORK)


def test_bad_input_is_refused_before_the_weights_are_loaded(
    real_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(sharing_report, "load_model", loaded)
    for plan, json_path, plot_path, why in (
        (Plan(prompt=8190), None, None, "context is 8192"),
        (Plan(distinct=1000), None, None, "tokens of text"),
        (Plan(), tmp_path / "no" / "x.json", None, "there is no folder"),
        (Plan(), None, tmp_path / "x.gif", "must end in"),
    ):
        with pytest.raises(InputError, match=why):
            sharing_report.run_command(plan, str(real_weights), "cpu", "auto", json_path, plot_path, silent())


# ---- for people, and for programs


def test_the_tables_fit_and_the_words_hold_the_numbers(result: Result):
    console = silent(width=100)
    sharing_report.show(dataclasses.replace(result, plan=Plan()), console)
    text = written(console)
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    assert "3 of 3" in " ".join(written_with(result).split()) and "66.7%" in text and "59.3%" in text
    words = sharing_report.finding(result)
    assert "hold 11 blocks in place of 21, 52%" in words and "the hit rate is 0.0%" in words
    assert "paged: 21, shared: 11" in sharing_report.alt_text(result)
    assert len(sharing_report.plot(result).axes) == 3


def written_with(result: Result) -> str:
    console = silent()
    sharing_report.show(result, console)
    return written(console)


def test_targets_are_for_the_sizes_they_speak_of(result: Result):
    assert result.claims == []
    usual = dataclasses.replace(result, plan=Plan())
    assert [claim.target for claim in sharing.claims(usual)] == ["<= 0.25 x", ">= 5 x"]
    assert sharing.claims(usual)[0].met is False and sharing.claims(usual)[0].measured == 11 / 21


def test_after_ctrl_c_the_parts_that_were_whole_are_kept(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    names = ["samples", "questions", "chat", "distinct"]
    for n, name in reversed(list(enumerate(names))):
        monkeypatch.setattr(sharing, f"measure_{name}", stopped)
        if n == 0:
            with pytest.raises(KeyboardInterrupt):
                measure(tiny, "tiny", WORK, silent(), PLAN)
            break
        found = measure(tiny, "tiny", WORK, silent(), PLAN)
        assert found.partial and list(found.found) == names[:n]
        assert "Stopped half way" in written_with(found)
        sharing_report.plot(found)
        sharing_report.alt_text(found)


def test_the_command_writes_everything(
    real_weights: Path, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def measured(model: Llama, name: str, workload: Workload, console: Console, plan: Plan) -> Result:
        asked.append((name, workload.weights, plan))
        return dataclasses.replace(result, partial=len(asked) == 2)

    monkeypatch.setattr(sharing_report, "measure", measured)
    monkeypatch.setattr(sharing_report, "load_model", lambda *_: Llama.random(TINY))
    out, picture, console = tmp_path / "out.json", tmp_path / "out.png", silent()
    arguments = Plan(), str(real_weights), "cpu", "float32", out, picture, console
    assert sharing_report.run_command(*arguments) == 0
    assert asked[0] == (real_weights.name, "real", Plan())
    found = json.loads(out.read_text("utf-8"))["sections"]["sharing"]
    assert found["partial"] is False and found["about"]["machine"]["cores"] and found["about"]["command"]
    assert found["alt_text"] == sharing_report.alt_text(result) and found["finding"] == sharing_report.finding(result)
    assert found["hit_rates"] == {name: one.rate for name, one in result.found.items()}
    assert found["samples"]["held"]["shared"] == [5, 8, 8, 8, 8, 11]
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KeyboardInterrupt):
        sharing_report.run_command(*arguments)
    assert json.loads(out.read_text("utf-8"))["sections"]["sharing"]["partial"] is True


def test_a_chat_by_the_template_holds_the_answers(real_weights: Path):
    """As a server would: the text of the answers, by the chat template."""
    from minillm.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(real_weights)
    prompts = sharing.conversation(dataclasses.replace(WORK, tokenizer=tokenizer), Plan())
    answer = tokenizer.encode(" Lisbon lies on the Tagus.")
    first, second = prompts([]), prompts([answer])
    assert tokenizer.decode(second, skip_special=False).count("Lisbon lies on the Tagus.") == 1
    assert second[: len(first)] == first and second[len(first) : len(first) + len(answer)] == answer
    assert sharing.QUESTIONS[1] in tokenizer.decode(second) and sharing.QUESTIONS[2] not in tokenizer.decode(second)
