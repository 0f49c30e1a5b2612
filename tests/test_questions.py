"""The question bank: complete, not to be answered by pattern, its numbers those of the lessons' own solutions."""

import heapq
import math
import re
from collections import deque
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from statistics import fmean
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
import torch

from minillm.course import bank, formulas
from minillm.course.bank import load, variant
from minillm.course.formulas import MODELS, evaluate, filled, show
from minillm.course.moodle import moodle
from minillm.course.questions import key, pick, quiz
from minillm.errors import InputError
from minillm.lab.build import sources
from minillm.lab.checks import c04, c10, c12

LESSONS = [source.stem[:2] for source in sources()]
BANK = [question for lesson in LESSONS for question in load(lesson)]
OF = {kind: [question for question in BANK if question.kind == kind] for kind in bank.KEYS}
SEEDS = range(12)


def names(questions) -> list[str]:
    return [question.id for question in questions]


# ---- what is there


def test_there_are_enough_of_each_kind():
    assert len(BANK) >= 70
    for lesson in LESSONS:
        kinds = [question.kind for question in load(lesson)]
        assert len(kinds) >= 5 and kinds.count("essay") == 1, lesson
        assert "choice" in kinds and "calculation" in kinds, lesson


def test_ids_count_on():
    for lesson in LESSONS:
        assert names(load(lesson)) == [f"q{lesson}.{k}" for k in range(1, len(load(lesson)) + 1)]


@pytest.mark.parametrize("question", OF["choice"], ids=names(OF["choice"]))
def test_every_choice_is_explained(question):
    says, why = ([getattr(choice, part) for choice in question.choices] for part in ("says", "why"))
    assert len(question.choices) == len(set(says)) == len(set(why)) == 4
    assert all(len(text) > 30 for text in why)


@pytest.mark.parametrize("question", OF["essay"], ids=names(OF["essay"]))
def test_an_essay_has_a_rubric(question):
    assert question.points == 10 and len(question.criteria) >= 3 and len(question.explanation) > 300


@pytest.mark.parametrize("question", BANK, ids=names(BANK))
def test_nothing_is_lost_where_markdown_is_shown(question):
    texts = [question.text, question.explanation, *(part for c in question.choices for part in (c.says, c.why))]
    texts += [text for slip in question.slips for text in (slip.why,)]
    for text in texts:
        plain = re.sub(r"`[^`]*`", "", text)
        assert text.count("`") % 2 == 0 and not re.search(r"<\w", plain), "a tag outside of code is not shown"


def test_plans_name_questions_that_there_are():
    for plan in sorted((bank.FOLDER.parent / "plans").glob("*.md")):
        named = re.findall(r"\bq\d\d\.\d+", plan.read_text("utf-8"))
        assert set(named) <= set(names(BANK)), plan.name


# ---- not by pattern


def at_most_by_chance(n: int, chance: float) -> int:
    """So many hits a strategy that knows nothing has at most in 19 of 20 banks."""
    total = 0.0
    for hits in range(n + 1):
        total += math.comb(n, hits) * chance**hits * (1 - chance) ** (n - hits)
        if total >= 0.95:
            return hits
    return n


SURE = re.compile(r"\b(only|all|always|never|nothing|none|no|every|alone|whatever|exactly|cannot)\b", re.IGNORECASE)
STRATEGIES = {
    "the longest": lambda choice: len(choice.says),
    "the shortest": lambda choice: -len(choice.says),
    "most commas": lambda choice: choice.says.count(","),
    "most code": lambda choice: choice.says.count("`"),
    "most words of certainty": lambda choice: len(SURE.findall(choice.says)),
    "fewest words of certainty": lambda choice: -len(SURE.findall(choice.says)),
    "longest explanation": lambda choice: len(choice.why),
}


@pytest.mark.parametrize("strategy", list(STRATEGIES)[:-1])
def test_a_pattern_finds_no_more_than_chance(strategy):
    hits = 0.0
    for question in OF["choice"]:
        scores = [(STRATEGIES[strategy](choice), choice.right) for choice in question.choices]
        best = [right for score, right in scores if score == max(scores)[0]]
        hits += sum(best) / len(best)
    assert hits <= at_most_by_chance(len(OF["choice"]), 1 / 4)


def test_the_right_choice_stands_everywhere_alike():
    places = [0] * 4
    for question in OF["choice"]:
        for seed in range(100):
            places[[choice.right for choice in variant(question, seed).choices].index(True)] += 1
    assert all(abs(count / sum(places) - 1 / 4) < 0.02 for count in places)


# ---- calculations


@pytest.mark.parametrize("question", OF["calculation"], ids=names(OF["calculation"]))
def test_a_calculation_has_variants_and_slips_that_are_wrong(question):
    variants = [variant(question, seed) for seed in range(60)]
    assert len({made.answer for made in variants}) >= 3
    for made in variants:
        assert math.isfinite(made.answer) and made.accepts(made.answer)
        assert not any(made.accepts(value) for value, _ in made.slips)
        assert not re.search("[{}]", made.text + made.explanation)
        assert question.tolerance or float(made.answer).is_integer() or question.id == "q05.6"
        assert show(made.answer) in made.explanation
    for slip in question.slips:  # each of them counts as wrong in most variants
        wrong = [not made.accepts(evaluate(slip.formula, made.values)) for made in variants]
        assert sum(wrong) >= 24, slip.formula


USES = {"05.peak_scores": "05.chunks", "10.find": "10.block_keys", "00.decode_ceiling": "00.floor_seconds"}


@cache
def solution(task: str):
    """A function out of a lesson's source: the solution that learners can read."""
    lesson, name = task.split(".")
    source = next(s for s in sources() if s.stem.startswith(lesson)).read_text("utf-8")
    code = source.split(f'# %% task="{task}"\n')[1].split("\n# %%")[0]
    names = {"torch": torch, "math": math, "heapq": heapq, "fmean": fmean, "pairwise": pairwise, "Counter": None}
    names |= {"weights_read": c12.weights_read, "ceiling": formulas}
    if task in USES:
        names[USES[task].split(".")[1]] = solution(USES[task])
    exec("from __future__ import annotations\n" + code, names)
    return names[name]


def parameters(model: str) -> int:
    return solution("01.count_parameters")(MODELS[model])


def one_layer(v):
    config = MODELS[v["model"]]
    return solution("01.count_parameters")(replace(config, n_layers=2)) - solution("01.count_parameters")(
        replace(config, n_layers=1)
    )


def chosen(v):
    weights = torch.tensor([v["a"], 0.0, v["c"], v["d"]], dtype=torch.float64)
    return solution("03.choose")(weights.log(), 1.0, 0, 1.0, v["u"])


def steps_to_first_token(v):
    left, steps = v["n"], 0
    while left > 0:
        left -= v["budget"] - v["running"]
        steps += 1
    return steps


def idle_slots(v):
    durations = [v[name] for name in "abcdefgh"]
    starts = solution("08.static")([0.0] * 8, durations, 4)
    return 4 * max(s + d for s, d in zip(starts, durations, strict=True)) - sum(durations)


def second_newcomer(v):
    def make(pending, computed=0):
        return SimpleNamespace(pending=pending, computed=computed, finish_reason=None)

    waiting = deque([make(v["p"]), make(v["q"])])
    plan = solution("08.schedule")([make(1, 5) for _ in range(v["r"])], waiting, v["m"], v["r"] + 2)
    return plan[-1][1]


def samples(v, prompt, new):
    """(blocks held at the end, blocks copied) of samples of one prompt, played with lesson 10's functions."""
    memory, size = c10.Memory.fresh(2000, v["s"]), v["s"]
    first = [c10.right_take(memory) for _ in range(-(-prompt // size))]
    tables = [first] + [c10.right_hold(memory, first) for _ in range(v["n"] - 1)]
    copied = 0
    for position in range(prompt, prompt + new - 1):
        for table in tables:
            before = list(table)
            c10.right_copy_on_write(memory, table, position)
            copied += before != table
            if position // size == len(table):
                table.append(c10.right_take(memory))
    return sum(count > 0 for count in memory.owners), copied


def computed_behind_a_prefix(v):
    keys = solution("10.block_keys")(list(range(v["c"])) + [-1] * v["s"], v["s"])
    index = {block_key: i for i, block_key in enumerate(keys)}
    text = list(range(v["c"])) + [-2 - i for i in range(v["q"])]
    return len(text) - v["s"] * len(solution("10.find")(index, text, v["s"]))


def empty_blocks(v):
    size, text = 3, torch.arange(v["n"]).repeat_interleave(3 * v["k"])  # the answer does not depend on the size
    position = torch.arange(len(text))
    mask = (text[:, None] == text) & (position <= position[:, None])
    blocks = mask.view(v["n"] * v["k"], size, v["n"] * v["k"], size)
    return int((~blocks.any(3).any(1)).sum())


INDEPENDENT = {
    "q00.3": lambda v: (
        1e3
        * solution("00.floor_seconds")(
            2 * parameters(v["model"]), 1e6 * v["kv"], 1e9 * v["g"], 1e9 * v["b"], 1e9 * v["f"]
        )
    ),
    "q00.4": lambda v: solution("00.balance_batch")(v["itemsize"], v["b"], v["f"]),
    "q01.4": lambda v: len(bytes(8) + bytes(v["n"]) + bytes(v["begin"])),
    "q01.5": one_layer,
    "q02.1": lambda v: int(
        torch.arange(MODELS[v["model"]].n_kv_heads).repeat_interleave(
            MODELS[v["model"]].n_heads // MODELS[v["model"]].n_kv_heads
        )[v["h"]]
    ),
    "q02.4": lambda v: sum(v["n"] ** 2 for _ in range(MODELS[v["model"]].n_layers * MODELS[v["model"]].n_heads)),
    "q03.2": chosen,
    "q03.5": lambda v: solution("03.tokens_computed")(v["n"], v["m"]),
    "q04.2": lambda v: int(1e9 * v["gb"] / MODELS[v["model"]].kv_bytes_per_token(2) / v["n"]),
    "q04.4": lambda v: (
        MODELS[v["model"]].n_layers
        * MODELS[v["model"]].n_heads
        * (v["n"] ** 2 + sum(v["n"] + i for i in range(1, v["g"])))
    ),
    "q05.2": lambda v: solution("05.peak_scores")(v["m"] * v["k"] + v["r"], v["m"], v["heads"]),
    "q05.5": steps_to_first_token,
    "q05.6": lambda v: 100 * sum(i for i in range(1, v["k"] + 1)) / v["k"] ** 2,
    "q06.5": lambda v: sum(
        solution("06.wasted")([[0] * v[f"p{i}"] for i in (1, 2, 3)], [v[f"n{i}"] for i in (1, 2, 3)])
    ),
    "q06.6": lambda v: solution("06.refill_pads")(v["n"], v["b"]),
    "q06.7": lambda v: (
        solution("00.decode_ceiling")(v["b"], v["s"], MODELS[v["model"]], 2, 1e9, 1e30)
        / solution("00.decode_ceiling")(1, v["s"], MODELS[v["model"]], 2, 1e9, 1e30)
    ),
    "q07.2": lambda v: solution("07.scores_needed")([v["a"], v["b"], v["c"]], [v["a"], v["b"], v["c"]]),
    "q07.6": lambda v: solution("07.scores_dense")([1] * v["n"] + [v["p"]], [v["s"]] * v["n"] + [v["p"]]),
    "q07.7": lambda v: (
        2
        * (parameters(v["model"]) - parameters_outside(v["model"]))
        / (MODELS[v["model"]].n_layers * MODELS[v["model"]].n_heads * 4 * MODELS[v["model"]].head_dim)
    ),
    "q08.2": idle_slots,
    "q08.4": lambda v: max(i / v["mu"] - i / v["lam"] for i in range(v["n"])),
    "q08.6": second_newcomer,
    "q09.1": lambda v: 100 * fmean(range(v["s"])) / (v["n"] + fmean(range(v["s"]))),
    "q09.2": lambda v: solution("09.slots_of")(
        [v["x"], v["y"], v["z"]], 2 * v["s"] + v["j"], 2 * v["s"] + v["j"] + 1, v["s"]
    )[0],
    "q09.3": lambda v: solution("09.blocks_needed")(v["s"] * v["k"] - v["t"] + 1 + v["t"] - 1, v["s"]),
    "q10.5": lambda v: samples(v, v["p"], 3)[1],
    "q10.6": computed_behind_a_prefix,
    "q10.7": lambda v: samples(v, v["s"] * v["b"], v["t"])[0],
    "q11.2": empty_blocks,
    "q11.4": lambda v: (v["s1"] * 2.0 ** (-v["d"] / math.log(2))) + v["s2"],
    "q11.7": lambda v: v["n"] * v["s"] * MODELS[v["model"]].kv_bytes_per_token(2) / MODELS[v["model"]].n_layers / 1e3,
    "q11.8": lambda v: solution("11.intensity")(
        1, v["s"], MODELS[v["model"]].n_heads, MODELS[v["model"]].n_kv_heads, 64, v["itemsize"]
    ),
    "q12.1": lambda v: (
        1e6 * solution("12.step_floor")(MODELS[v["model"]], v["b"], [v["s"]] * v["b"], 1e12 * v["tb"], 1e30)
    ),
    "q12.2": lambda v: solution("12.run_queue")([v["k"]] * v["n"], v["t"])[-1][1],
    "q12.7": lambda v: solution("12.overlapped")([v["h"]] * v["n"], [v["d"]] * v["n"])[1],
    "q13.2": lambda v: solution("13.metrics")(0.0, [v["f"] + 1000 * v["t"] * i / (v["n"] - 1) for i in range(v["n"])])[
        1
    ],
    "q13.6": lambda v: 1e3 * solution("13.mean_wait")(v["r"], [v["a"] / 1e3, v["b"] / 1e3]),
    "q13.10": lambda v: solution("13.fleet")(v["r"], Fraction(v["ms"], 1000), Fraction(v["load"], 100), v["spare"]),
}


def parameters_outside(model: str) -> int:
    config = MODELS[model]
    return (1 if config.tied else 2) * config.vocab_size * config.d_model + (2 * config.n_layers + 1) * config.d_model


def test_every_calculation_is_computed_in_another_way():
    assert set(INDEPENDENT) == set(names(OF["calculation"]))


@pytest.mark.parametrize("question", OF["calculation"], ids=names(OF["calculation"]))
def test_answers_are_those_of_the_lessons_own_solutions(question):
    for seed in SEEDS:
        made = variant(question, seed)
        other = INDEPENDENT[question.id](made.values)
        assert made.answer == pytest.approx(other, rel=max(question.tolerance / 2, 1e-9)), made.values


def test_models_are_the_known_ones():
    for name, config in MODELS.items():
        assert (config.n_layers, config.n_kv_heads, config.head_dim) == c04.MODELS[name][:3]
        assert formulas.parameters(config) == solution("01.count_parameters")(config)
    known = {"SmolLM2-135M": 134_515_008, "Llama-2-7B": 6_738_415_616, "Mistral-7B": 7_241_732_096}
    assert known.items() <= {name: formulas.parameters(config) for name, config in MODELS.items()}.items()


# ---- formulas


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os')", "m.__class__", "m.n_layers.real", "x", "9 ** 9", "[1]", "1 / 0", "'a' * 3", "m + 1",
        "lambda: 1", "max(1, key=2)", "(1).real", "open(1)", "1 if 1 else 2", "kv_bytes_per_token(3, 2)", "1 +", "",
    ],
)  # fmt: skip
def test_a_formula_is_arithmetic_and_nothing_else(formula):
    with pytest.raises(InputError, match="formula"):
        evaluate(formula, {"m": "Llama-2-7B", "n": 3})


def test_formulas_and_what_is_shown():
    values = {"m": "Llama-3.2-1B", "n": 7}
    assert evaluate("-n + ceil(n / 2) * (n >= 7) + m.n_layers", values) == -7 + 4 + 16
    assert filled("{m} has {m.n_layers * 1000}, {n / 3} and {n}", values) == "Llama-3.2-1B has 16,000, 2.333 and 7"
    shown = {
        1234567: "1,234,567",
        0.5: "0.5",
        1234.5: "1,234",
        2.0: "2",
        0.0: "0",
        0.001234567: "0.001235",
        -1.5: "-1.5",
    }
    assert {value: show(value) for value in shown} == shown


# ---- sheets


def test_a_sheet_depends_on_the_seed_and_nothing_else():
    assert quiz(["04"], 7) == quiz(["04"], 7) and len({quiz(["04"], seed) for seed in range(8)}) == 8
    for made in pick(["04", "09"], 7, 6):  # in other company
        assert made == variant(made.question, 7)


def test_the_sheet_tells_nothing_and_the_key_all():
    for lesson in LESSONS:
        sheet, told = quiz([lesson], 3, essay=True), key([lesson], 3, essay=True)
        for made in pick([lesson], 3, essay=True):
            asks = made.question
            for text in (*(choice.why for choice in made.choices), *(why for _, why in made.slips), made.explanation):
                assert text not in sheet or not text
                assert text in told
            assert all(criterion.says in told and criterion.says not in sheet for criterion in asks.criteria)
            assert made.text in sheet and made.text in told and sheet.count(f"({asks.id}, ") == 1
        assert "** is " not in sheet
    right = [letter for letter, made in re.findall(r"^- \*\*(\w)\*\* is (right)", key(["04"], 3), re.M)]
    expected = [choice.right for made in pick(["04"], 3) for choice in made.choices]
    assert right == ["ABCD"[i % 4] for i, is_right in enumerate(expected) if is_right]


def test_a_few_questions_cover_what_they_can():
    for lesson in LESSONS:
        for seed in range(4):
            some = pick([lesson], seed, 4)
            assert len(some) == 4 and all(made.question.kind != "essay" for made in some)
            assert len({name for made in some for name in made.question.objectives}) >= 4
    assert len({tuple(names(made.question for made in pick(["13"], seed, 4))) for seed in range(6)}) > 2
    assert [made.question.id for made in pick(["03", "05"], 0, essay=True)][-2:] == ["q03.7", "q05.7"]


@pytest.mark.parametrize(
    ("lessons", "n", "words"),
    [(["14"], None, "lesson '14'"), ([], None, "no lesson"), (["04"], 0, "n is 0"), (["04"], 99, "n is 99")],
)
def test_what_cannot_be_asked(lessons, n, words):
    with pytest.raises(InputError, match=words):
        quiz(lessons, 0, n)


# ---- a file with faults

ENTRY = """
[[question]]
id = "q04.1"
kind = "choice"
objectives = ["04.1"]
minutes = 2
difficulty = 1
text = "What?"
[[question.choice]]
right = true
says = "a"
why = "because"
[[question.choice]]
says = "b"
why = "not"
[[question.choice]]
says = "c"
why = "not so"
"""
NUMBER = """
[[question]]
id = "q04.1"
kind = "calculation"
objectives = ["04.1"]
minutes = 2
difficulty = 1
text = "What is {n} and 1?"
formula = "n + 1"
explanation = "{n + 1}"
values = { n = { from = 1, to = 9, step = 2 } }
"""


def test_a_file_without_faults_is_read(tmp_path):
    (tmp_path / "04.toml").write_text(ENTRY + NUMBER.replace("q04.1", "q04.2"))
    first, second = load("04", tmp_path)
    assert first.choices[0].right and variant(second, 1).answer in (2, 4, 6, 8, 10)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[question]", "not readable as TOML"),
        (ENTRY.replace("right = true", ""), "0 of 3 choices are right"),
        (ENTRY.replace('kind = "choice"', 'kind = "guess"'), "kind is 'guess'; it must be one of choice"),
        (ENTRY.replace('text = "What?"', ""), "'text' is missing"),
        (ENTRY.replace("minutes = 2", "minutes = 0"), "minutes is 0"),
        (ENTRY.replace("difficulty = 1", "difficulty = 4"), "difficulty is 4"),
        (ENTRY.replace('["04.1"]', "[]"), "objectives is empty"),
        (ENTRY.replace("q04.1", "q05.1"), "must begin with q04"),
        (ENTRY.replace("minutes", "points = 3\nminutes"), "points is not known"),
        (ENTRY + ENTRY, "q04.1 is there twice"),
        (NUMBER.replace('"n + 1"', '"m + 1"'), "'m' is not allowed"),
        (NUMBER.replace("{n + 1}", "{n +}"), "has no value"),
        (NUMBER.replace('"{n + 1}"', '""'), "explanation"),
        (NUMBER.replace("{ from = 1, to = 9, step = 2 }", "[]"), "values.n is empty"),
        (NUMBER.replace("step = 2", "stop = 2"), "'step' is missing"),
        ('[[question]]\nid = 3\nkind = "essay"', "question 1 (3)"),
    ],
)
def test_a_fault_is_named_with_its_place(tmp_path, text, words):
    (tmp_path / "04.toml").write_text(text)
    with pytest.raises(InputError, match=re.escape(words)) as raised:
        load("04", tmp_path)
    assert "04.toml" in str(raised.value)


# ---- Moodle XML


def test_moodle_gets_every_question_with_its_answers():
    root = ET.fromstring(moodle(LESSONS, 5).encode())
    kinds = [question.get("type") for question in root]
    assert root.tag == "quiz" and kinds.count("category") == len(LESSONS)
    for kind, theirs in (("choice", "multichoice"), ("calculation", "numerical"), ("essay", "essay")):
        assert kinds.count(theirs) == len(OF[kind])
    made = {found.question.id: found for found in pick(LESSONS, 5, essay=True)}
    for question in root:
        if question.get("type") == "category":
            assert question.findtext("category/text").startswith("$course$/minillm/lesson ")
            continue
        asks = made[question.findtext("name/text")]
        assert question.find("questiontext").get("format") == "markdown"
        assert question.findtext("questiontext/text").startswith(asks.text)
        assert [tag.text for tag in question.findall("tags/tag/text")] == list(asks.question.objectives)
        assert float(question.findtext("defaultgrade")) == asks.question.points
        answers = question.findall("answer")
        assert [answer.get("fraction") for answer in answers].count("100") == (asks.question.kind != "essay")
        if asks.choices:
            right = next(choice for choice in asks.choices if choice.right)
            [theirs] = [answer for answer in answers if answer.get("fraction") == "100"]
            assert theirs.findtext("text") == right.says and theirs.findtext("feedback/text") == right.why
            assert question.findtext("single") == "true" and question.findtext("shuffleanswers") == "true"
        elif asks.answer is not None:
            assert float(answers[0].findtext("text")) == asks.answer
            assert float(answers[0].findtext("tolerance")) == pytest.approx(asks.answer * asks.question.tolerance)
            told = [answer.findtext("feedback/text") for answer in answers[1:]]
            assert told == [f"This answer {why}." for _, why in asks.slips]
        else:
            assert all(criterion.says in question.findtext("graderinfo/text") for criterion in asks.question.criteria)


def test_moodle_gets_variants_of_calculations():
    root = ET.fromstring(moodle(["06"], 5, variants=3).encode())
    named = [question.findtext("name/text") for question in root if question.get("type") != "category"]
    assert [name for name in named if name.startswith("q06.6")] == [f"q06.6, seed {seed}" for seed in (5, 6, 7)]
    assert named.count("q06.1") == 1
    with pytest.raises(InputError, match="variants is 0"):
        moodle(["06"], 5, variants=0)
    categories = [question.findtext("category/text") for question in root if question.get("type") == "category"]
    assert "$course$/minillm/lesson 06/q06.6" in categories
