"""The whole benchmark on a tiny model: what is compared with what, and what is written down."""

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from conftest import TINY
from rich.console import Console

from minillm import attention
from minillm.bench import claims, ladder, live, peers, report, results, run_command, workload
from minillm.bench.harness import Job, Run, run
from minillm.bench.ladder import Result, measure, pick_stages, sets_of
from minillm.bench.verify import Verifier
from minillm.bench.workload import PRESETS, pick_preset, random_workload
from minillm.errors import InputError
from minillm.model import Llama
from minillm.stages import STAGES

SHORT = dataclasses.replace(
    PRESETS["quick"], small=2, small_cap=4, main=5, main_longest=100, main_cap=6, max_running=2, rounds=2
)


def silent(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def result(tiny: Llama) -> Result:
    return measure(tiny, "tiny", random_workload(SHORT, TINY), SHORT, list(STAGES), silent())


# ---- what is run


def test_naive_runs_the_small_set_and_its_neighbour_both():
    assert sets_of(["naive", "cached", "padded"]) == {
        "naive": ["small"],
        "cached": ["main", "small"],
        "padded": ["main"],
    }
    assert sets_of(["naive"]) == {"naive": ["small"]}
    assert sets_of(["padded", "continuous"]) == {"padded": ["main"], "continuous": ["main"]}


def test_stages_come_in_the_order_of_the_ladder():
    assert pick_stages(None) == list(STAGES)
    assert pick_stages(["continuous", "naive", "naive"]) == ["naive", "continuous"]


@pytest.mark.parametrize("name", ["", "Naive", "all"])
def test_unknown_names_are_refused(name: str):
    with pytest.raises(InputError, match="stage .* is not known; use one of naive, "):
        pick_stages([name])
    with pytest.raises(InputError, match="preset .* is not known; use one of quick, full"):
        pick_preset(name)


def test_real_prompts_become_two_sets(real_weights: Path):
    from minillm.config import Config
    from minillm.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(real_weights)
    for preset in PRESETS.values():
        work = workload.real_workload(tokenizer, preset, Config.from_folder(real_weights))
        small, main = work.sets["small"], work.sets["main"]
        assert (len(small), len(main)) == (preset.small, preset.main)
        assert len(main) > preset.max_running  # or nobody would ever wait for a place
        assert max(len(job.prompt) for job in small) <= preset.small_longest
        assert len({job.prompt for job in main}) == len(main)
        assert len(work.text) >= 4096 and len(work.questions) == len(small)
        begin, end = tokenizer.encode_chat([{"role": "user", "content": "x"}])[0], small[0].prompt[-3:]
        assert all(job.prompt[0] == begin and job.prompt[-3:] == end for job in main)  # by the template


def test_a_short_context_admits_fewer_prompts(real_weights: Path):
    from minillm.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(real_weights)
    work = workload.real_workload(tokenizer, SHORT, dataclasses.replace(TINY, vocab_size=49152, context=60))
    assert all(len(job.prompt) + job.max_tokens <= 60 for jobs in work.sets.values() for job in jobs)
    with pytest.raises(InputError, match="context is 20"):
        workload.real_workload(tokenizer, SHORT, dataclasses.replace(TINY, vocab_size=49152, context=20))


def test_lengths_are_where_the_model_ends_a_text(tiny: Llama):
    work = random_workload(SHORT, TINY)
    work.lengths_known = False
    jobs = [Job(job.prompt, 100, ignore_eos=False) for job in work.sets["main"]]
    with ladder.progress(silent()) as bar:
        fixed = ladder.fix_lengths(tiny, "main", jobs, work, SHORT, bar)
    free = run(tiny, "naive", jobs)
    assert [job.max_tokens for job in fixed] == [len(output) for output in free.outputs]
    assert len({job.max_tokens for job in fixed}) > 1  # some end by themselves
    assert run(tiny, "padded", fixed, SHORT.limits).outputs == free.outputs


def test_rounds_stop_when_there_is_no_time_for_another(tiny: Llama):
    console, work = silent(), random_workload(SHORT, TINY)
    plan = sets_of(["cached", "padded"])
    hurried = dataclasses.replace(SHORT, seconds=-1, rounds=9)
    runs, _ = ladder.timed_rounds(tiny, plan, work.sets, work, hurried, 0.0, console)
    assert {key: len(value) for key, value in runs.items()} == {("cached", "main"): 1, ("padded", "main"): 1}


# ---- what comes out


def test_every_stage_has_a_row_and_is_right(result: Result):
    assert [row.stage for row in result.rows] == list(STAGES)
    for row in result.rows:
        assert row.void is None and row.positions_checked > 0 and row.share_excused == 0
        assert row.output_throughput_min <= row.output_throughput <= row.output_throughput_max
        assert 0 < row.ceiling_share < 1 and len(row.rounds) == 2
        assert row.tokens_wasted >= 0
    assert [row.request_set for row in result.rows] == ["small"] + ["main"] * (len(STAGES) - 1)


def test_ratios_are_taken_on_a_common_set_and_multiplied(result: Result):
    first, cached, chunked, *_ = result.rows
    assert (first.ratio_before, first.ratio_first) == (None, 1.0)
    assert (cached.ratio_before_set, chunked.ratio_before_set) == ("small", "main")
    assert chunked.ratio_before == chunked.output_throughput / cached.output_throughput
    product = 1.0
    for row in result.rows[1:]:
        assert row.ratio_before is not None
        product *= row.ratio_before
        assert row.ratio_first == pytest.approx(product)


def test_counts_of_the_first_round_hold_for_all(tiny: Llama):
    jobs = random_workload(SHORT, TINY).sets["main"]
    for stage in STAGES:
        one, other = (run(tiny, stage, jobs, SHORT.limits) for _ in range(2))
        assert one.counts.steps == other.counts.steps and one.outputs == other.outputs


def test_a_wrong_stage_is_void_and_nothing_is_compared_with_it(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    """A stage that looks one position too far back emits other tokens."""
    right = STAGES["chunked"]

    def wrong(model: Llama, requests: list, chunk: int = 256):
        visible = attention.visible
        attention.visible = lambda q, k, *seq: visible(q, k + 1, *seq) | (k[..., None, :] == 0)
        try:
            yield from right(model, requests, chunk)
        finally:
            attention.visible = visible

    monkeypatch.setitem(STAGES, "chunked", wrong)
    console = silent()
    stages = ["cached", "chunked", "padded"]
    found = measure(tiny, "tiny", random_workload(SHORT, TINY), SHORT, stages, console)
    cached, chunked, padded = found.rows
    assert cached.void is None and padded.void is None and chunked.void is not None
    assert chunked.ratio_first is chunked.ratio_before is padded.ratio_before is padded.ratio_first is None
    report.show(found, console)
    assert "chunked is void" in " ".join(written(console).split())
    assert "void" in report.alt_text(found)
    report.plot(found)


def test_the_tables_say_whether_it_is_right_before_how_fast(result: Result):
    console = silent(width=80)
    report.show(result, console)
    text = written(console)
    correct, fast = text.index("Is it the naive model's text"), text.index("Tokens per second")
    assert correct < fast < text.index("latency")
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text  # nothing is cut off
    for stage in STAGES:
        assert text.count(f"\n {stage}") >= 3
    assert "small set" in text and "main set" in text


def test_json_holds_everything_and_comes_back(result: Result, tmp_path: Path):
    path = tmp_path / "out.json"
    report.save(result, path, None, silent())
    found = results.load(path)["ladder"]
    assert found == json.loads(json.dumps(report.as_json(result)))
    assert found["partial"] is False
    for key in ("cpu", "cores", "memory_gb"):
        assert found["about"]["machine"][key]
    for key in ("python", "torch", "minillm"):
        assert found["about"]["versions"][key]
    assert found["about"]["command"] and re.match(r"\d{4}-\d\d-\d\dT", found["about"]["date"])
    assert (found["model"]["dtype"], found["model"]["device"], found["model"]["weights"]) == (
        "float64",
        "cpu",
        "random",
    )
    assert found["preset"]["max_running"] == 2
    rows = {row["stage"]: row for row in found["rows"]}
    assert rows["padded"]["tokens_pushed"] > rows["ragged"]["tokens_pushed"] == rows["ragged"]["tokens_useful"]
    assert len(rows["naive"]["rounds"]) == 2 and rows["naive"]["rounds"][0]["tpot"]["p95"] > 0
    assert all(stage in found["alt_text"] for stage in STAGES)


def test_the_plot_is_written(result: Result, tmp_path: Path):
    for name, begin in (("out.png", b"\x89PNG"), ("out.svg", b"<?xml")):
        report.save(result, None, tmp_path / name, silent())
        assert (tmp_path / name).read_bytes().startswith(begin)


def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(tmp_path: Path):
    with pytest.raises(InputError, match="there is no folder"):
        run_command(None, "quick", [], "no such model", "cpu", "auto", tmp_path / "x" / "y", None, False, silent())
    (tmp_path / "old.json").write_text('{"schema": 1}')
    with pytest.raises(InputError, match="has schema 1"):
        run_command(None, "quick", [], "no such model", "cpu", "auto", tmp_path / "old.json", None, False, silent())


# ---- stopped half way


def test_ctrl_c_keeps_the_stages_that_ran_and_says_so(tiny: Llama, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The third timed run is stopped: of naive, cached (both sets) and padded, naive alone is whole."""
    timed = 0

    def stopped(*args: object) -> Run:
        nonlocal timed
        timed += 1
        if timed > 2:
            raise KeyboardInterrupt
        return run(*args)

    work = random_workload(SHORT, TINY)
    monkeypatch.setattr(ladder, "warm_up", lambda *args: None)
    monkeypatch.setattr(ladder, "run", stopped)
    stages = ["naive", "cached", "padded"]
    half = measure(tiny, "tiny", work, SHORT, stages, silent())
    assert half.partial and [row.stage for row in half.rows] == ["naive"]
    console = silent()
    report.show(half, console)
    report.save(half, tmp_path / "half.json", None, silent())
    assert "PARTIAL" in written(console)
    assert results.load(tmp_path / "half.json")["ladder"]["partial"] is True
    with pytest.raises(KeyboardInterrupt):  # nothing was whole
        measure(tiny, "tiny", work, SHORT, stages, silent())


# ---- the texts as they come


class Letters:
    """A tokenizer whose tokens are characters: id 7 is ESC, 8 is a line break."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 64 for c in text]

    def decoder(self) -> "Letters":
        return self

    def push(self, token: int) -> str:
        return {7: "\x1b[31m", 8: "\n"}.get(token, chr(64 + token))

    def flush(self) -> str:
        return ""


def test_texts_are_shown_and_cannot_touch_the_terminal(tiny: Llama):
    jobs = [Job((5, 6, 7), 40), Job((9, 10, 11), 40)]
    console = silent()
    questions = ["what\x1b[2J?", "and [bold]this[/bold]?"]
    first = live.watch(tiny, "cached", jobs, questions, {}, Letters(), console, None)
    text = written(console)
    assert "\x1b" not in text and "\\x1b[2J" in text and "[bold]" in text
    assert "A" <= text[text.index("\n") + 5] <= "\x7f"
    again = live.watch(tiny, "continuous", jobs, questions, {}, Letters(), console, first)
    assert "the same text as cached's, token for token (80 tokens)" in written(console)
    other = dataclasses.replace(again, outputs=[again.outputs[0], [*again.outputs[1][:5], 0, 0]])
    assert "text 2 leaves cached's at token 6" in live.same_text(other, first).plain


# ---- claims and peers


def test_claims_say_why_they_are_not_measured(tiny: Llama):
    text = list(range(64)) * 5
    assert [claim.met for claim in claims.caching(tiny, text)] == [None, None]
    verifier = Verifier(tiny)
    short = claims.chunking(tiny, text, 64, verifier)
    assert short.measured is None and "context is 256" in short.detail
    assert "tokens in all" in claims.against_transformers(tiny, text, verifier, "random").detail


def test_caching_claims_are_measured(tiny: Llama):
    gain, flat = claims.caching(tiny, list(range(64)) * 5, contexts=(8, 16, 32))
    for claim in (gain, flat):
        assert claim.measured is not None and claim.measured > 0 and claim.met is not None
    assert gain.met == (gain.measured >= 10) and flat.met == (flat.measured <= 1.5)


def test_chunks_bound_the_memory_of_a_prompt():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells a process's peak memory")
    model = Llama.random(dataclasses.replace(TINY, context=4096))
    text = [i % 64 for i in range(2048)]
    claim = claims.chunking(model, text, 64, Verifier(model), size=2048)
    assert claim.measured is not None and claim.met is (claim.measured >= 4), claim
    assert claim.values["same_tokens"] and claim.measured > 2


def test_batching_compares_the_rows(result: Result):
    claim = claims.batching(result.rows)
    by_stage = {row.stage: row.output_throughput for row in result.rows}
    assert claim.measured == by_stage["continuous"] / by_stage["padded"]
    void = [dataclasses.replace(row, void="wrong") for row in result.rows]
    assert claims.batching(void).met is None


def test_transformers_has_the_same_weights(tiny: Llama):
    pytest.importorskip("transformers")
    peer = peers.from_llama(tiny)
    prompts = [(5, 6, 7), (8, 9, 10)]
    outputs, stamps = peers.generate(peer, prompts, 12)
    assert outputs == run(tiny, "naive", [Job(p, 12) for p in prompts]).outputs
    assert len(stamps) == 12 and stamps == sorted(stamps)


def test_transformers_is_compared(tiny: Llama):
    pytest.importorskip("transformers")
    text = [2 + (i * i) % 60 for i in range(64)]
    verifier = Verifier(tiny)
    claim = claims.against_transformers(tiny, text, verifier, "random", N=4, n_prompt=8, n_new=6)
    assert claim.measured is not None and claim.values["tokens_equal"] == claim.values["tokens"] == 24


def test_other_families_have_no_peer():
    pytest.importorskip("transformers")
    model = Llama.random(dataclasses.replace(TINY, qk_norm=True))
    with pytest.raises(InputError, match="plain Llamas"):
        peers.from_llama(model)


# ---- the command


def test_the_command_on_real_weights(real_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    short = dataclasses.replace(PRESETS["quick"], small=1, small_cap=3, main=2, main_longest=64, main_cap=3)
    monkeypatch.setitem(PRESETS, "quick", dataclasses.replace(short, rounds=1))
    console, out, plot = silent(), tmp_path / "out.json", tmp_path / "out.png"
    arguments = "quick", [], str(real_weights), "cpu", "float32", out, plot, True, console
    assert run_command(["naive", "continuous"], *arguments) == 0
    found = results.load(out)["ladder"]
    assert [row["void"] for row in found["rows"]] == [None, None]
    assert found["model"]["weights"] == "real" and found["model"]["dtype"] == "float32"
    assert plot.exists() and "the same text as naive's, token for token (3 tokens)" in written(console)
