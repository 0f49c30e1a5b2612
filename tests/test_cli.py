"""The command line, run as a user runs it: in this process where that is enough, else in one of its own.

Most tests use a tiny random model with a byte-level tokenizer. It writes rubbish, with control characters and
broken UTF-8 among it, which is what a terminal has to be kept safe from.
"""

import contextlib
import dataclasses
import importlib
import inspect
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from minillm import doctor
from minillm.cli import app, read_prompts, write_in_order
from minillm.config import Config
from minillm.conversation import Conversation
from minillm.engine import Engine
from minillm.errors import InputError
from minillm.kernels import BACKENDS, choose, why_not
from minillm.kernels.gather import GatherAttend
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import Event, make_request
from minillm.stages import STAGES, kernels
from minillm.terminal import one_line, printable
from minillm.tokenizer import BYTE_OF, Tokenizer
from minillm.weights import sources_of, split_shape
from tests.conftest import TINY

ROOT = Path(__file__).parents[1]
COMMANDS = ["generate", "chat", "ladder", "simulate", "trace", "profile", "bench", "serve", "load", "weights", "doctor"]
EXPERIMENTS = ["queue", "prefill", "memory", "sharing", "scaling"]
CHOOSING = [name for name, stage in STAGES.items() if "backend" in inspect.signature(stage).parameters]
NAME = "smollm2-135m-instruct"  # what a command uses when no model is named
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny(folder: Path, context: int = 256) -> Path:
    """A checkpoint folder in the Hugging Face layout: `TINY` over the 256 bytes and two special tokens."""
    config = dataclasses.replace(TINY, vocab_size=258, context=context, eos=(257,))
    folder.mkdir(parents=True)
    raw = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tied,
        "eos_token_id": list(config.eos),
    }
    vocab = {char: byte for char, byte in BYTE_OF.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "added_tokens": [{"id": i, "content": t, **flags} for i, t in enumerate(("<|im_start|>", "<|im_end|>"), 256)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    for name, content in (
        ("config.json", raw),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    tensors = {}
    for name, parameter in Llama.random(config, seed=0).named_parameters():
        rows = [shape[0] for shape in split_shape(name, tuple(parameter.shape), config)]
        for source, part in zip(sources_of(name), parameter.split(rows), strict=True):
            tensors[source] = part.contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a context that it cannot fill within a test."""
    return save_tiny(tmp_path_factory.mktemp("models") / "endless", context=1_000_000)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured here is not kept for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for weights."""
    monkeypatch.setenv("MINILLM_WEIGHTS", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def run(*args: object, stdin: str | bytes | None = None, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, env=env)


def tiny_args(folder: Path, *more: object) -> tuple[object, ...]:
    return "--model", folder, "--device", "cpu", "--dtype", "float64", *more


def start(*args: object, **options: object) -> "subprocess.Popen[bytes]":
    """Ctrl-C reaches it, also where the tests run in the background of a shell, whose children ignore SIGINT."""
    command = [sys.executable, "-m", "minillm", *map(str, args)]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "preexec_fn": listens} | options
    return subprocess.Popen(command, **options)  # type: ignore[call-overload,no-any-return]


def expected_text(folder: Path, prompt: str, **params: object) -> str:
    engine = Engine.from_pretrained(folder, device="cpu", dtype="float64", max_running=1, max_len=256)
    return engine.generate([prompt], SamplingParams(**params))[0].text


def check_refused(result: Result, *words: str) -> None:
    """One line on stderr that holds these words, exit code 2, nothing on stdout."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


# ---- help


@pytest.mark.parametrize("args", [["--help"], ["--version"], [], *([c, "-h"] for c in COMMANDS)], ids=str)
def test_help_does_not_wait_for_torch(args: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["minillm", *{args}]
from minillm.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False False"
    assert len(done.stdout.splitlines()) > 1


def test_help_needs_no_manual() -> None:
    text = run("--help").stdout
    assert all(re.search(rf"\b{command}  +\w", text) for command in COMMANDS)
    for command in COMMANDS:
        text = run(command, "--help", env={"COLUMNS": "80"}).stdout
        assert max(map(len, text.splitlines())) <= 80
        assert command == "doctor" or f"$ minillm {command}" in text or f"| minillm {command}" in text
    text = run("generate", "--help").stdout
    assert all(re.search(rf"\b{name}\b", text) for name in (*STAGES, *BACKENDS, "auto"))


# ---- bad input


@pytest.mark.parametrize(
    "args, words",
    [
        ([""], ["prompt is empty"]),
        ([], ["no prompt", "--file"]),
        (["x" * 300], ["300 tokens", "256"]),
        (["--chat", "x" * 300], ["tokens", "256"]),
        (["a\udcff"], ["surrogate", "U+DCFF"]),
        (["hi", "--max-tokens", "0"], ["max_tokens is 0", "at least 1"]),
        (["hi", "--max-tokens", "-3"], ["max_tokens is -3", "at least 1"]),
        (["hi", "--max-tokens", "many"], ["--max-tokens", "minillm generate --help"]),
        (["hi", "--min-tokens", "9", "--max-tokens", "8"], ["min_tokens is 9", "at most 8"]),
        (["hi", "--temperature", "nan"], ["temperature is nan"]),
        (["hi", "--temperature", "-1"], ["temperature is -1.0"]),
        (["hi", "--top-p", "1.5"], ["top_p is 1.5"]),
        (["hi", "--seed", "-1"], ["seed is -1"]),
        (["hi", "--stop", ""], ["stop"]),
        (["hi", "--repetition-penalty", "0"], ["repetition_penalty is 0.0"]),
        (["hi", "--stage", "quick"], ["stage 'quick'", "naive", "continuous"]),
        (["hi", "--stage", "naive", "--budget", "8"], ["'naive'", "--budget"]),
        (["hi", "--stage", "padded", "--block", "8"], ["'padded'", "--block"]),
        (["hi", "--stage", "continuous", "--kv-slots", "8"], ["'continuous'", "--kv-slots"]),
        (["hi", "--stage", "paged", "--kv-slots", "30"], ["30 KV slots", "16 or 32"]),
        (["hi", "--stage", "paged", "--block", "0"], ["block size is 0"]),
        (["hi", "--stage", "shared", "--kv-slots", "16"], ["256 KV slots", "there are 16"]),
        (["hi", "--backend", "abacus"], ["backend 'abacus'", "auto", "gather"]),
        (["hi", "--stage", "naive", "--backend", "gather"], ["'naive'", "--backend", f"--stage {CHOOSING[0]}"]),
        (["hi", "--samples", "0"], ["--samples"]),
        (["hi", "--samples", "2"], ["--samples 2", "--temperature 1"]),
        (["hi", "ho", "--budget", "1"], ["budget is 1", "max_running, 2"]),
        (["hi", "--max-running", "0"], ["--max-running"]),
        (["hi", "--device", "tpu"], ["device 'tpu'", "cpu"]),
        (["hi", "--dtype", "int8"], ["dtype 'int8'", "float32"]),
        (["hi", "--model", "nowhere/at/all"], ["nowhere/at/all", NAME]),
        (["hi", "--model", "two\nlines"], ["two\\nlines"]),
        (["hi", "--file", "no/such/file"], ["no/such/file", "No such file"]),
        (["hi", "--file", "."], [".", "directory"]),
        (["hi", "--colour"], ["--colour", "minillm generate --help"]),
    ],
    ids=lambda value: " ".join(value)[:40].encode("unicode_escape").decode() if value else "nothing",
)
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], words: list[str], folder: Path) -> None:
    model = [] if "--model" in args else ["--model", folder]
    check_refused(run("generate", *model, *args), *words)


@pytest.mark.parametrize("args", [["genrate"], ["--nope"], ["bench", "--preset", "huge"], ["doctor", "extra"]])
def test_misused_commands_are_refused_the_same_way(args: list[str]) -> None:
    check_refused(run(*args), "--help")


def test_cuda_without_cuda(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check_refused(run("generate", "hi", "--model", folder, "--device", "cuda"), "cuda", "--device cpu")


def test_one_bad_prompt_stops_all_and_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Llama, "from_pretrained", lambda *_: pytest.fail("the weights were loaded"))
    result = run("generate", "good", "y" * 257, "fine", "--model", folder)
    check_refused(result, "prompt 2 of 3", "yyyy", "257 tokens", "256")
    check_refused(run("generate", "good", "", "--model", folder), "prompt 2 of 2", "empty")


def test_no_weights_says_what_to_run(home: Path) -> None:
    for args in (["generate", "hi"], ["chat"]):
        check_refused(run(*args), str(home), f"minillm weights {NAME}")


@pytest.mark.parametrize("kept", [0, 7, 500, -1], ids=lambda n: f"{n} bytes")
def test_truncated_weights(kept: int, folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[:kept])
    check_refused(run("generate", "hi", "--model", broken), str(broken / "model.safetensors"), "corrupt")


def test_a_folder_without_tokenizer_or_template(folder: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(folder, tmp_path / "plain")
    (plain / "tokenizer_config.json").unlink()
    assert run("generate", "hi", *tiny_args(plain, "--max-tokens", 2)).exit_code == 0
    check_refused(run("generate", "hi", "--chat", "--model", plain), "no chat template")
    check_refused(run("chat", "--model", plain), "no chat template")
    (plain / "tokenizer.json").unlink()
    check_refused(run("generate", "hi", "--model", plain), "tokenizer.json")


@pytest.mark.parametrize("args", [["--debug", "generate", ""], ["generate", "", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(args: list[str]) -> None:
    result = run(*args, "--model", "nowhere")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and result.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("value, shown", [("1", True), ("0", False), ("", False)])
def test_debug_from_the_environment(value: str, shown: bool) -> None:
    result = run("generate", "hi", "--model", "nowhere", env={"MINILLM_DEBUG": value})
    assert result.exit_code == 2 and ("Traceback" in result.stderr) == shown


def test_after_two_dashes_everything_is_a_prompt(folder: Path) -> None:
    result = run("generate", *tiny_args(folder, "--max-tokens", 5), "--", "--debug")
    assert result.exit_code == 0, result.output
    assert result.stdout == expected_text(folder, "--debug", max_tokens=5) + "\n"


def test_a_bug_keeps_its_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setitem(STAGES, "kernels", broken)
    assert isinstance(run("generate", "hi", *tiny_args(folder)).exception, ZeroDivisionError)


# ---- generate


@pytest.mark.parametrize("stage", STAGES)
def test_stdout_holds_the_text_and_nothing_else(stage: str, folder: Path) -> None:
    result = run("generate", "Once", *tiny_args(folder, "--max-tokens", 20, "--stage", stage))
    assert result.exit_code == 0, result.output
    assert result.stdout == expected_text(folder, "Once", max_tokens=20) + "\n"
    assert re.fullmatch(r"\d+ tokens in [\d.]+ s \([\d.]+ tokens/s\), .*\n", result.stderr)


@pytest.mark.parametrize("stage", ["naive", "padded", "continuous"])
@pytest.mark.parametrize("max_running", [None, 1, 2])
def test_several_texts_come_in_order_under_headings(stage: str, max_running: int | None, folder: Path) -> None:
    prompts = ["one", "the second\n\x1b[31m prompt", "[red]3[/red]", "one"]
    limit = [] if max_running is None or stage == "naive" else ["--max-running", max_running]
    result = run("generate", *prompts, *tiny_args(folder, "--max-tokens", 12, "--stage", stage, *limit))
    assert result.exit_code == 0, result.output
    expected = ""
    for i, prompt in enumerate(prompts, 1):
        text = expected_text(folder, prompt, max_tokens=12)
        expected += f"=== {i} of 4: {one_line(prompt)}\n{text}\n\n"
    assert result.stdout == expected
    assert result.stderr.startswith("4 texts, ")


def test_options_reach_the_request(folder: Path) -> None:
    long = expected_text(folder, "Once", max_tokens=60, ignore_eos=True)
    stop = long[20:22]
    result = run("generate", "Once", *tiny_args(folder, "--max-tokens", 60, "--ignore-eos", "--stop", stop))
    assert result.stdout == long[: long.index(stop)] + "\n"
    assert "ended by stop" in result.stderr
    args = tiny_args(folder, "--max-tokens", 20, "--repetition-penalty", 3.0, "--frequency-penalty", 2.0)
    result = run("generate", "Once", *args)
    penalties = {"repetition_penalty": 3.0, "frequency_penalty": 2.0}
    assert result.stdout == expected_text(folder, "Once", max_tokens=20, **penalties) + "\n"
    assert result.stdout != long[:20] + "\n"


def test_the_same_seed_gives_the_same_text(folder: Path) -> None:
    def draw(*more: object) -> Result:
        return run("generate", "Once", *tiny_args(folder, "--temperature", 2.0, "--max-tokens", 40, *more))

    first, again, other = draw("--seed", 5), draw("--seed", 5), draw("--seed", 6)
    assert first.stdout == again.stdout != other.stdout
    fresh = draw()
    seed = re.search(r"seed (\d+)", fresh.stderr)
    assert seed and draw("--seed", seed[1]).stdout == fresh.stdout  # a new seed is told, so that it can be repeated


@pytest.mark.parametrize("stage", ["continuous", "paged", "shared"])
def test_samples_of_a_prompt_differ_and_come_again_with_the_seed_that_is_told(
    folder: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a new seed each time would, once in some hundred runs, be one by which two texts end at their first token
    monkeypatch.setattr("minillm.draws.fresh_seed", lambda: 2026)

    def draw(*more: object) -> Result:
        options = ("--samples", 3, "--temperature", 2.0, "--max-tokens", 20, "--stage", stage)
        return run("generate", "Once", "Twice", *tiny_args(folder, *options, *more))

    first = draw()
    pattern = r"^=== (\d) of 6: (Once|Twice) \(sample (\d)\)\n(.*?)\n\n(?==== |\Z)"
    made = re.findall(pattern, first.stdout, flags=re.M | re.S)
    assert [heading for *heading, _ in made] == [
        [str(i + 1), "Once" if i < 3 else "Twice", str(i % 3 + 1)] for i in range(6)
    ]
    assert len({text for *_, text in made}) == 6
    seed = re.search(r"seed (\d+)", first.stderr)
    assert seed and draw("--seed", seed[1]).stdout == first.stdout


@pytest.mark.parametrize("stage", CHOOSING)
def test_the_text_does_not_depend_on_the_backend(folder: Path, stage: str) -> None:
    """In float64, of all that can run it here; the line of statistics says which it was."""
    expected = expected_text(folder, "Once", max_tokens=12)
    model = Llama.from_pretrained(folder, device="cpu", dtype="float64")
    for name in (name for name in BACKENDS if why_not(name, model) is None):
        result = run("generate", "Once", *tiny_args(folder, "--max-tokens", 12, "--stage", stage, "--backend", name))
        assert result.exit_code == 0 and result.stdout == expected + "\n", (name, result.output)
        assert result.stderr.endswith(f"; backend {name}\n")
    request = make_request([5], SamplingParams(max_tokens=3), model.config, None, 8)
    with pytest.raises(InputError, match="abacus"):  # it is the stage's engine that is told
        next(STAGES[stage](model, [request], backend="abacus"))


def test_auto_is_what_was_measured_for_so_many_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measured(model: Llama, running: int) -> str:
        asked.append(running)
        warnings.warn("backend 'abacus' is left out: it is wood", RuntimeWarning, stacklevel=1)
        return "dense"

    monkeypatch.setattr(choose, "choose", measured)
    for options, running in (([], 2), (["--max-running", 1], 1), (["--backend", "auto"], 2)):
        more = ("--max-tokens", 3, "--stage", CHOOSING[-1], *options)
        result = run("generate", "Once", "Twice", *tiny_args(folder, *more))
        assert result.exit_code == 0 and asked.pop() == running and not asked
        told, statistics = result.stderr.splitlines()
        assert told == "backend 'abacus' is left out: it is wood" and statistics.endswith("; backend dense")
    result = run("generate", "Once", *tiny_args(folder, "--max-tokens", 3, "--stage", "naive"))
    assert "backend" not in result.stderr and not asked


def test_a_backend_that_cannot_run_here_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatherAttend, "why_not", lambda model: "it is tired", raising=False)
    args = ("generate", "hi", "--stage", CHOOSING[-1])
    for command in (args, ["chat"]):
        check_refused(run(*command, *tiny_args(folder, "--backend", "gather")), "'gather'", "it is tired")
        check_refused(run(*command, "--model", "nowhere", "--backend", "abacus"), "'abacus'", "auto", "dense")


def test_a_full_context_is_said(folder: Path) -> None:
    result = run("generate", "x" * 250, *tiny_args(folder, "--ignore-eos"))
    assert result.exit_code == 0
    assert "7 tokens" in result.stderr and "a full context" in result.stderr


def test_weights_that_are_not_numbers(folder: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    broken = shutil.copytree(folder, tmp_path / "nan")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, broken / "model.safetensors")
    result = run("generate", "hi", *tiny_args(broken))
    assert result.exit_code == 1
    assert "not numbers" in result.stderr and "Traceback" not in result.output


def test_real_weights(real_weights: Path) -> None:
    result = run("generate", "The capital of France is", "--model", real_weights, "--max-tokens", 2)
    assert result.exit_code == 0, result.output
    assert "Paris" in result.stdout


# ---- prompts from files


lines = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r\ufeff"), min_size=1)


@given(st.lists(lines.filter(str.strip), min_size=1), st.sampled_from(["\n", "\r\n", "\n\n \n"]), st.booleans())
def test_every_line_of_a_file_is_a_prompt(prompts: list[str], end: str, bom: bool) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"minillm-prompts-{os.getpid()}.txt"
    try:
        path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + end.join(prompts).encode())
        assert read_prompts(str(path)) == prompts
    finally:
        path.unlink()


def test_arguments_and_a_file_together(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("two\n\n  \nthree", encoding="utf-8")
    args = tiny_args(folder, "--max-tokens", 2)
    result = run("generate", "one", "--file", tmp_path / "prompts.txt", *args)
    assert re.findall(r"^=== (.*)$", result.stdout, re.M) == ["1 of 3: one", "2 of 3: two", "3 of 3: three"]
    piped = run("generate", "one", "--file", "-", *args, stdin="two\nthree\n")
    assert piped.stdout == result.stdout


@pytest.mark.parametrize(
    "data, words",
    [(b"good\nb\xffd\n", ["0xff", "line 2", "UTF-8"]), (b"", ["no prompt"]), (b"\n \n", ["no prompt"])],
)
def test_bad_files(data: bytes, words: list[str], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(data)
    result = run("generate", "--file", tmp_path / "prompts.txt", "--model", folder)
    check_refused(result, str(tmp_path / "prompts.txt"), *words)
    check_refused(run("generate", "--file", "-", "--model", folder, stdin=data), *words)


# ---- chat


def make_conversation(folder: Path, system: str | None = None, max_tokens: int = 20) -> Conversation:
    params = SamplingParams(max_tokens=max_tokens)
    return Conversation(Tokenizer.from_pretrained(folder), Config.from_folder(folder), system, params)


def test_a_conversation_is_answered_line_by_line(folder: Path) -> None:
    """Each answer is the one the model gives to the whole conversation so far."""
    conversation = make_conversation(folder)
    engine = Engine.from_pretrained(folder, device="cpu", dtype="float64", max_running=1, max_len=256)
    answers = []
    for text in ("Hi", "Who?"):
        request, _ = conversation.ask(text)
        answer = engine.generate([request.prompt], SamplingParams(max_tokens=20))[0].text
        conversation.answered(text, answer)
        answers.append(answer)
    args = tiny_args(folder, "--temperature", 0, "--top-p", 1, "--max-tokens", 20)
    result = run("chat", *args, stdin="Hi\n\nWho?\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{answers[0]}\n{answers[1]}\n" and result.stderr == ""
    reset = run("chat", *args, stdin="Hi\n/reset\nHi\n/quit\nnot read\n")
    assert reset.stdout == f"{answers[0]}\n{answers[0]}\n"
    assert "forgotten" in reset.stderr


def test_chat_takes_the_backend_it_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = tiny_args(folder, "--temperature", 0, "--max-tokens", 5)
    expected = run("chat", *args, "--backend", "gather", stdin="Hi\nWho?\n")
    assert expected.exit_code == 0 and expected.stderr == ""
    names: list[str] = []
    real = kernels.generate

    def generate(*given: object, backend: str, **more: object) -> Iterator[Event]:
        names.append(backend)
        return real(*given, backend=backend, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "generate", generate)
    monkeypatch.setattr(choose, "choose", lambda model, running: "segments" if running == 1 else "dense")
    for options, name in ((["--backend", "dense"], "dense"), ([], "segments")):
        result = run("chat", *args, *options, stdin="Hi\nWho?\n")
        assert result.stdout == expected.stdout and result.stderr == "" and names == [name] * 2
        names.clear()


def test_chat_goes_on_after_bad_lines(folder: Path) -> None:
    """A byte that isn't UTF-8, an unknown command, a message too long: a line each, and nothing is lost."""
    args = tiny_args(folder, "--temperature", 0, "--max-tokens", 5)
    bad = b"b\xffd\n/nope\n" + b"x" * 400 + b"\n"
    result = run("chat", *args, stdin=b"Hi\n" + bad + b"Who?\n")
    assert result.exit_code == 0, result.output
    errors = result.stderr.splitlines()
    assert len(errors) == 3 and all(line.startswith("error: ") for line in errors)
    assert "surrogate" in errors[0] and "/reset" in errors[1]
    assert re.search(r"4\d\d tokens.*256.*251.*5", errors[2])
    assert result.stdout == run("chat", *args, stdin="Hi\nWho?\n").stdout


def test_old_turns_make_room_and_it_is_said(folder: Path) -> None:
    args = tiny_args(folder, "--temperature", 0, "--max-tokens", 20)
    result = run("chat", *args, stdin="".join(f"{c * 50}\n" for c in "abcde"))
    assert result.exit_code == 0, result.output
    assert re.search(r"the conversation has \d+ tokens, but the context of 256 .*dropped", result.stderr)


@given(st.lists(st.tuples(st.text(max_size=90), st.text(max_size=60)), max_size=12), st.integers(1, 300))
def test_a_conversation_always_fits(folder: Path, turns: list[tuple[str, str]], max_tokens: int) -> None:
    """What is kept is the latest turns, whole, with room for an answer; a refused message changes nothing."""
    conversation = make_conversation(folder, "Be brief.", max_tokens)
    said: list[dict[str, str]] = []
    for question, reply in turns:
        before = conversation.turns
        try:
            request, dropped = conversation.ask(question)
        except InputError as error:
            assert "256" in str(error) and conversation.turns == before
            continue
        assert len(request.prompt) + min(max_tokens, 128) <= 256
        assert request.limit >= min(max_tokens, 128)
        assert bool(dropped) == (conversation.turns != before)
        conversation.answered(question, reply)
        said += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        assert len(conversation.turns) % 2 == 0
        assert conversation.turns == said[len(said) - len(conversation.turns) :]
        text = conversation.tokenizer.decode(request.prompt)
        assert text.startswith("system\nBe brief.\n") and text.endswith(f"user\n{question}\nassistant\n")


def test_a_system_message_that_cannot_fit(folder: Path) -> None:
    check_refused(run("chat", "--model", folder, "--system", "x" * 300), "256", "shorten")


# ---- what reaches a terminal


@given(st.text())
def test_what_is_shown_moves_no_cursor(text: str) -> None:
    shown = printable(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" for c in shown)
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


@given(st.text(), st.integers(1, 50))
def test_one_line_is_one_short_line(text: str, most: int) -> None:
    line = one_line(text, most)
    assert len(line) <= most and not any(unicodedata.category(c) in ("Cc", "Cs") for c in line)
    assert len(one_line(text)) > most or line == one_line(text)


def read_terminal(master: int, until: Callable[[bytes], bool] = lambda _: False) -> bytes:
    """What a program writes to its terminal, to the end or until enough was seen."""
    seen = b""
    with contextlib.suppress(OSError):  # how Linux reports that the other side was closed
        while not until(seen) and (data := os.read(master, 4096)):
            seen += data
    return seen


def test_a_terminal_gets_no_control_characters_from_a_text(folder: Path) -> None:
    options = {"temperature": 5.0, "max_tokens": 150, "ignore_eos": True}
    seed = next(s for s in range(100) if "\x1b" in expected_text(folder, "Hi", seed=s, **options))
    text = expected_text(folder, "Hi", seed=seed, **options)
    args = tiny_args(folder, "--temperature", 5, "--seed", seed, "--max-tokens", 150, "--ignore-eos")
    master, slave = pty.openpty()
    process = start("generate", "Hi", *args, stdout=slave)
    os.close(slave)
    seen = read_terminal(master)
    os.close(master)
    stderr = process.communicate()[1]
    assert process.returncode == 0, stderr
    assert seen.decode().replace("\r\n", "\n") == printable(text) + "\n"


def test_ctrl_c_ends_the_live_view_with_the_cursor_back_and_the_texts_kept(endless: Path) -> None:
    master, slave = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    args = tiny_args(endless, "--max-tokens", 20_000, "--ignore-eos")
    process = start("generate", "Hi", "[bold]Ho[/bold]", *args, stdout=slave, env=env)
    os.close(slave)
    seen = read_terminal(master, lambda seen: re.search(rb" [1-9]\d* tokens ", seen) is not None)
    process.send_signal(signal.SIGINT)
    seen += read_terminal(master)
    os.close(master)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and b"Traceback" not in stderr, stderr
    hidden, shown = seen.rfind(b"\x1b[?25l"), seen.rfind(b"\x1b[?25h")
    assert 0 <= hidden < shown
    final = seen[shown:].decode()
    assert "1 of 2: Hi" in final and "2 of 2: [bold]Ho[/bold]" in final
    assert re.search(r" [1-9]\d* tokens ", final)


def test_ctrl_c_ends_generate(endless: Path) -> None:
    process = start("generate", "Hi", *tiny_args(endless, "--max-tokens", 20_000, "--ignore-eos"))
    assert process.stdout and process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout.endswith(b"\n") and stderr == b""


def test_ctrl_c_stops_an_answer_and_twice_ends_the_chat(endless: Path) -> None:
    args = tiny_args(endless, "--max-tokens", 20_000, "--temperature", 0, "--repetition-penalty", 1.5)
    process = start("chat", *args, stdin=subprocess.PIPE)
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    assert b"Ctrl-C again" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and stderr == b""


def test_a_reader_that_leaves_is_no_error(endless: Path) -> None:
    process = start("generate", "Hi", *tiny_args(endless, "--max-tokens", 20_000, "--ignore-eos"))
    assert process.stdout and process.stderr and process.stdout.read(5)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1


def test_an_ascii_locale(folder: Path) -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = start("generate", "Hi", *tiny_args(folder, "--max-tokens", 60, "--ignore-eos"), env=env)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    text = expected_text(folder, "Hi", max_tokens=60, ignore_eos=True)
    assert stdout.decode("ascii") == text.encode("ascii", "backslashreplace").decode() + "\n"


# ---- measuring and setting up


def test_bench_and_ladder_hand_over_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    harness = importlib.import_module("minillm.bench")
    monkeypatch.setattr(harness, "run_command", lambda **given: calls.append(given) or 0)
    assert run("bench", "--stages", "naive, cached", "--preset", "full", "--json", tmp_path / "x").exit_code == 0
    assert run("ladder", "--device", "cpu", "--dtype", "float32", "--model", "m").exit_code == 0
    bench, ladder = calls
    assert (bench["stages"], bench["preset"], bench["stream"]) == (["naive", "cached"], "full", False)
    assert (bench["json_path"], bench["plot_path"], bench["device"]) == (tmp_path / "x", None, "auto")
    assert (ladder["stages"], ladder["preset"], ladder["stream"]) == (None, "quick", True)
    assert (ladder["device"], ladder["dtype"], ladder["model"]) == ("cpu", "float32", "m")


def test_bench_refuses_before_it_measures(tmp_path: Path) -> None:
    check_refused(run("bench", "--stages", "naive,fast"), "'fast'", "continuous")
    check_refused(run("ladder", "--stages", ""), "''")
    check_refused(run("bench", "--json", tmp_path / "no" / "x"), str(tmp_path / "no" / "x"))
    check_refused(run("ladder", "--model", "nowhere"), "nowhere")


def test_bench_backends_hands_over_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    harness = importlib.import_module("minillm.bench.backends")
    monkeypatch.setattr(harness, "run_command", lambda *given: calls.append(given) or 1)
    args = ["--json", tmp_path / "x", "--plot", tmp_path / "y.png", "--model", "m", "--device", "cpu"]
    assert run("bench", "--backends", *args).exit_code == 1
    assert calls[0][:5] == ("m", "cpu", "auto", tmp_path / "x", tmp_path / "y.png")
    assert run("bench", "--dtype", "float32", "--backends").exit_code == 1
    assert calls[1][:5] == (NAME, "auto", "float32", None, None)
    monkeypatch.undo()
    for option, value in (("--stages", "naive"), ("--preset", "quick"), ("--peer", "transformers")):
        check_refused(run("bench", "--backends", option, value), option, "--backends")
        check_refused(run("bench", option, value, "--backends"), option, "--backends")
    check_refused(run("bench", "--backends", "queue"), "--backends", "'queue'")
    check_refused(run("bench", "--backends", "--json", tmp_path / "no" / "x"), str(tmp_path / "no" / "x"))
    check_refused(run("bench", "--backends", "--model", "nowhere"), "nowhere")


@pytest.mark.parametrize(
    "given, handed",
    [
        ([], []),
        (["--peer", "transformers"], [("transformers", None)]),
        (["--peer", "llama-bench", "a/b", "--stages", "naive"], [("llama-bench", "a/b")]),
        (
            ["--peer", "http", "http://x:1/v1?a=b", "--peer", "transformers", "--peer", "llama-bench", "c"],
            [("http", "http://x:1/v1?a=b"), ("transformers", None), ("llama-bench", "c")],
        ),
        (["--peer", "http", "--stages", "naive"], [("http", None)]),  # refused by `peers.parse`
    ],
)
def test_peers_are_one_word_or_two(given: list[str], handed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(importlib.import_module("minillm.bench"), "run_command", lambda **g: calls.append(g) or 0)
    assert run("bench", *given).exit_code == 0
    assert calls[0]["peers"] == handed


def test_unknown_peers_are_refused_before_it_measures(tmp_path: Path) -> None:
    check_refused(run("bench", "--peer", "vllm"), "'vllm'", "use transformers, llama-bench PATH or http URL")
    check_refused(run("bench", "--peer", "http"), "'http'", "http URL")
    check_refused(run("bench", "--peer", "llama-bench", tmp_path / "none"), str(tmp_path / "none"))
    check_refused(run("bench", "--peer", "http", "http://127.0.0.1:9/v1"), "http://127.0.0.1:9")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_has_options_and_examples_of_its_own(name: str, tmp_path: Path) -> None:
    shown = run("bench", name, "--help")
    assert shown.exit_code == 0 and f"$ minillm bench {name}" in shown.stdout
    check_refused(run("bench", "--json", tmp_path / "x", name), "--json", name)  # it would be lost
    check_refused(run("bench", name, "--json", tmp_path / "no" / "x"), str(tmp_path / "no" / "x"))
    (tmp_path / "old.json").write_text('{"schema": 1, "rows": []}')
    check_refused(run("bench", name, "--json", tmp_path / "old.json"), "old.json", "schema 1")
    check_refused(run("bench", name, "--plot", tmp_path / "x.bmp"), "x.bmp", ".png")
    check_refused(run("bench", name, "--model", "nowhere"), "nowhere")


@pytest.mark.parametrize(
    "args, words",
    [
        (["bench", "queue", "--slots", "0"], ["slots is 0"]),
        (["bench", "queue", "--scenarios", "article,best"], ["'best'", "closed"]),
        (["bench", "queue", "--load", "nan"], ["load is nan"]),
        (["bench", "prefill", "--budgets", "64,many"], ["--budgets", "'64,many'"]),
        (["bench", "prefill", "--budgets", "16"], ["16"]),
        (["bench", "prefill", "--prompt", "100000"], ["100000", "8192"]),
        (["bench", "memory", "--chunks", ""], ["--chunks"]),
        (["bench", "memory", "--stages", "fast"], ["'fast'"]),
        (["bench", "memory", "--blocks", "16,0"], ["block size is 0"]),
        (["bench", "memory", "--requests", "0"], ["requests is 0"]),
        (["bench", "sharing", "--samples", "1"], ["samples is 1"]),
        (["bench", "sharing", "--turns", "9"], ["turns is 9"]),
        (["bench", "sharing", "--system", "8190"], ["system is 8190", "8192"]),
        (["bench", "scaling", "--contexts", "64,128"], ["contexts", "at least 3"]),
        (["bench", "scaling", "--batches", "1,2,many"], ["--batches", "'1,2,many'"]),
        (["bench", "scaling", "--prompts", "64,128,256,9000"], ["9000", "8192"]),
        (["bench", "scaling", "--backend", "best"], ["'best'", "gather"]),
        (["profile", "--steps", "1"], ["steps is 1"]),
        (["profile", "--context", "9000"], ["context is 9000", "8192"]),
        (["profile", "--backend", "best"], ["'best'", "gather"]),
        (["simulate", "--rate", "-1"], ["rate is -1"]),
        (["simulate", "--seeds", "0"], ["seeds is 0"]),
        (["simulate", "--policies", "static,lifo"], ["'lifo'"]),
        (["simulate", "--arrivals", "nowhere.csv"], ["'nowhere.csv'", "poisson"]),
        (["trace", "--stage", "fast"], ["'fast'", "continuous"]),
        (["trace", "--stage", "naive", "--budget", "64"], ["'naive'", "--budget"]),
        (["trace", "--plot", "x.bmp"], ["x.bmp", ".png"]),
        (["trace", "--rate", "0"], ["rate is 0"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_experiments_that_make_no_sense_are_refused(args: list[str], words: list[str]) -> None:
    check_refused(run(*args), *words)


def test_profile_and_scaling_hand_over_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.bench import profile, scaling, scaling_report

    calls: list[tuple[object, ...]] = []
    for module in (profile, scaling_report):
        monkeypatch.setattr(module, "run_command", lambda *given: calls.append(given) or 0)
    asked = ["--running", "2", "--context", "9", "--backend", "dense", "--dtype", "float32", "--json", tmp_path / "x"]
    assert run("profile", *asked, "--prompt", "0", "--steps", "7").exit_code == 0
    sizes = ["--contexts", "1,2,3", "--batches", "4,5,6", "--prompts", "6,7,8,9", "--budget", "3", "--rounds", "1"]
    assert run("bench", "scaling", *asked, *sizes, "--plot", tmp_path / "y.png").exit_code == 0
    plan = profile.Plan(running=2, context=9, prompt=0, steps=7, backend="dense")
    assert calls[0][:-1] == (plan, NAME, "auto", "float32", tmp_path / "x")
    plan = scaling.Plan(2, (1, 2, 3), (4, 5, 6), 9, (6, 7, 8, 9), 3, 1, "dense")
    assert calls[1][:-1] == (plan, NAME, "auto", "float32", tmp_path / "x", tmp_path / "y.png")
    assert run("profile").exit_code == run("bench", "scaling").exit_code == 0
    assert [call[0] for call in calls[2:]] == [profile.Plan(), scaling.Plan()]


def test_a_profile_of_a_folder(folder: Path, tmp_path: Path) -> None:
    """From the command line to the file, on the tiny model."""
    sizes = ["--running", "2", "--context", "5", "--prompt", "4", "--steps", "5", "--backend", "gather"]
    shown = run("profile", *sizes, "--model", folder, "--json", tmp_path / "x")
    assert shown.exit_code == 0 and "floor" in shown.stdout and "gate_up" in shown.stdout
    assert json.loads((tmp_path / "x").read_text())["sections"]["profile"]["plan"]["running"] == 2


def test_a_bad_line_of_a_trace_is_named_by_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output\n0,4,5\n0.5,4,many\n")
    check_refused(run("simulate", "--arrivals", path), "line 3", "'many'")


def test_simulate_prints_the_article_beside_the_simulated(tmp_path: Path) -> None:
    shown = run("simulate", "--json", tmp_path / "out.json")
    assert shown.exit_code == 0
    assert "INFERRED" in shown.stdout and "151.36" in shown.stdout and "34.62" in shown.stdout
    assert json.loads((tmp_path / "out.json").read_text())["sections"]["simulation"]["partial"] is False


def test_weights_list_and_mistakes(home: Path, folder: Path) -> None:
    assert re.search(rf"^{NAME} +no ", run("weights", "--list").stdout, re.M)
    shutil.copytree(folder, home / NAME)
    shutil.copytree(folder, home / "someone" / "else")
    listed = run("weights", "--list").stdout
    assert re.search(rf"^{NAME} +yes ", listed, re.M) and re.search(r"^someone/else +yes ", listed, re.M)
    assert run("weights").stdout == f"{home / NAME}\n"
    check_refused(run("weights", "nothing"), "'nothing'", NAME)
    check_refused(run("weights", "--from", "hub"), "OWNER/NAME")
    check_refused(run("weights", "--from", "hub", "noslash"), "OWNER/NAME")
    check_refused(run("weights", "--from", "hub", "a/b", "--wheel", "x.whl"), "--wheel")
    check_refused(run("weights", "--from", "nowhere"), "--from")


def test_doctor_says_what_is_here(home: Path, folder: Path) -> None:
    shutil.copytree(folder, home / NAME)
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["missing"] == []
    assert report["weights"] == {"model": NAME, "folder": str(home / NAME), "error": None}
    cpu = report["devices"][0]
    assert cpu["device"] == "cpu" and report["cpu"]["memory_gb"] > 0
    assert min(cpu["copy_gb_s"], cpu["float32_gflop_s"], cpu["bfloat16_gflop_s"]) > 0
    assert report["dtype"] in ("float32", "bfloat16") and all(report["packages"][n] for n in doctor.NEEDED)
    assert list(report["backends"]) == list(BACKENDS) and report["backends"]["gather"] is None


def test_doctor_says_which_backends_can_run_here_and_why_not(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, home / NAME)
    monkeypatch.setattr(doctor, "copy_bytes", lambda: 1 << 20)
    reasons = {"slow": None, "fast": "it needs a machine that nobody has"}
    monkeypatch.setattr("minillm.kernels.BACKENDS", dict.fromkeys(reasons, ""))
    asked: list[tuple[str, int]] = []

    def why_not(name: str, model: Llama) -> str | None:
        asked.append((name, model.config.head_dim))
        return reasons[name]

    monkeypatch.setattr("minillm.kernels.why_not", why_not)
    shown = " ".join(run("doctor").stdout.split())
    assert "backends slow; not here: fast (it needs a machine that nobody has)" in shown
    assert asked == [("slow", TINY.head_dim), ("fast", TINY.head_dim)]


def test_doctor_says_what_is_missing_and_what_mends_it(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "copy_bytes", lambda: 1 << 20)
    result = run("doctor")
    assert result.exit_code == 1
    assert "missing: " in result.stdout and f"run  minillm weights {NAME}" in result.stdout

    shutil.copytree(folder, home / NAME)
    with (home / NAME / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    result = run("doctor")
    assert result.exit_code == 1 and "corrupt" in result.stdout
    assert f"run  rm -r '{home / NAME}' && minillm weights {NAME}" in result.stdout

    found = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: None if name in ("torch", "gguf") else found(name))
    result = run("doctor")
    assert result.exit_code == 1 and "missing: packages: torch, gguf" in result.stdout
    assert "backends" not in result.stdout
    assert "run  make run" in result.stdout


def test_doctor_estimates_the_lessons_between_the_ratios_of_the_two_speeds(tmp_path: Path) -> None:
    """Half the bandwidth and a tenth of the arithmetic: from 2 to 10 times as long; in float32 twice the bytes."""
    there = {"copy_gb_s": 40.0, "bfloat16_gflop_s": 1000, "float32_gflop_s": 300}
    here = {"copy_gb_s": 20.0, "bfloat16_gflop_s": 100, "float32_gflop_s": 500}
    seconds = {"00_tour": {"size": "default", "seconds": 30.0}, "01_x": {"size": "ci", "seconds": 5.0}}
    lessons = {"speeds": there, "dtype": "bfloat16", "seconds": seconds}
    assert doctor.lesson_seconds(tmp_path, here, "bfloat16") == {}
    (tmp_path / "a.json").write_text("not JSON")
    (tmp_path / "b.json").write_text(json.dumps({"sections": {"lessons": {"seconds": seconds}}}))  # no speeds
    (tmp_path / "c.json").write_text(json.dumps({"sections": {"lessons": lessons}}))
    assert doctor.lesson_seconds(tmp_path, here, "bfloat16") == {"00_tour": [60.0, 300.0]}
    assert doctor.lesson_seconds(tmp_path, here, "float32") == {"00_tour": [60.0, 120.0]}
    assert doctor.minutes(("00_tour", [60.0, 300.0])) == "00 1.0 to 5.0"
    assert doctor.minutes(("00_tour", [60.0, 61.0])) == "00 1.0"


def test_doctor_knows_all_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [re.match(r"\w+", need)[0] for need in project["dependencies"]] == list(doctor.NEEDED)
    for package, extra in doctor.OPTIONAL.items():
        assert package in project["optional-dependencies"][extra]


def test_ctrl_c_loses_no_text_that_was_made(capsys: pytest.CaptureFixture[str]) -> None:
    """Texts are put out whole and in order; what is unfinished when the key is pressed comes as far as it came."""
    requests = [make_request([5], SamplingParams(max_tokens=3), TINY, None, 8) for _ in range(3)]

    def events() -> Iterator[Event]:
        yield Event(requests[1], 1, "second", "stop")
        yield Event(requests[0], 1, "fir", None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_in_order(["a", "b", "c"], requests, events())
    assert re.findall(r"=== (\d) of 3.*\n(.*)\n", capsys.readouterr().out) == [("1", "fir"), ("2", "second"), ("3", "")]
