"""The page of the live view in headless Chromium: what is shown is what the server told, for every kind of visitor.

Needs Chromium (Debian: `apt-get install chromium`) and the Python package playwright; skipped without them.
"""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch

pytest.importorskip("fastapi", reason="the server needs `pip install 'minillm[serve]'`")
sync_api = pytest.importorskip("playwright.sync_api", reason="`pip install playwright` drives the browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium here; on Debian `apt-get install chromium`", allow_module_level=True)

from serving import CONFIG, LIVENESS, Served, ids, make_engine, serve, writes  # noqa: E402

from minillm.engine import Engine  # noqa: E402
from minillm.model import Llama  # noqa: E402
from minillm.request import Event  # noqa: E402
from minillm.server import compare  # noqa: E402
from minillm.sharing import SharedSlots  # noqa: E402

PATIENCE = 15_000  # milliseconds after which something does not come
SIGNS = {"waiting": "○", "again": "↺", "prefill": "▤", "decode": "▶", "ended": "■"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Brake:
    """Once armed, it holds an engine as soon as there is something to see: output, blocks held alone and shared."""

    def __init__(self, engine: Engine):
        self.pace = 0.0  # seconds before each step
        self._armed = self._shown = False
        self._go = threading.Event()
        self._engine, self._step = engine, engine.step
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[Event]:
        time.sleep(self.pace)
        if self._armed and self._worth_seeing():
            if self._shown:
                self._go.wait(LIVENESS)
            time.sleep(0.1)  # then a snapshot is made of the step that comes, and that is what the page is held at
            self._shown = True
        else:
            self._shown = False
        return self._step()

    def _worth_seeing(self) -> bool:
        scheduler = self._engine.scheduler
        assert isinstance(scheduler.slots, SharedSlots)
        alone = scheduler.slots.owners.count(1)
        shared = len(scheduler.slots.owners) - alone - scheduler.slots.owners.count(0)
        return sum(request.n_output > 4 for request in scheduler.running) > 2 and alone > 2 and shared > 2

    def arm(self) -> None:
        self._go.clear()
        self._armed = True

    def release(self) -> None:
        self._armed, self.pace = False, 0.0
        self._go.set()


@pytest.fixture(scope="module")
def busy() -> Iterator[Served]:
    """Long prompts, a small budget and less room than twelve texts want: everything there is to see."""
    model = Llama.random(replace(CONFIG, context=4096), seed=0, dtype=torch.float64)
    engine = make_engine(model, max_running=8, budget=512, max_len=2300, n_slots=4 * 1000)
    with serve(engine, live=True) as served:
        served.brake = Brake(engine)  # type: ignore[attr-defined]
        yield served


class Tab:
    """A page, and all that it complained about or asked for."""

    def __init__(self, page: Any, served: Served):
        self.page = page
        self.brake: Brake = getattr(served, "brake", None)  # type: ignore[assignment]
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def wait(self, condition: str, argument: Any = None) -> None:
        """Until this JavaScript is true; by polling, for the page forbids what would evaluate strings in it."""
        for _ in range(PATIENCE // 20):
            if self.page.evaluate(condition, argument):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"never: {condition}")

    def connected(self) -> "Tab":
        self.page.wait_for_selector(".link.good")
        return self

    def fill_batch(self) -> None:
        """The twelve requests, held when some of them have output, and share blocks."""
        self.brake.arm()
        self.page.click("#fill")
        for there in (".row[data-state=decode]", ".cell.own", ".cell.shared"):
            self.page.wait_for_selector(f"{there} >> nth=1", state="attached")


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    contexts, tabs = [], list[Tab]()

    def new(served: Served, path: str = "/", **options: Any) -> Tab:
        if not tabs:
            served.assert_drained()  # of the test before
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        tab = Tab(context.new_page(), served)
        tabs.append(tab)
        tab.page.goto(served.url + path)
        return tab

    yield new
    for tab in tabs:
        if tab.brake:
            tab.brake.release()
    for context in contexts:
        context.close()


@contextmanager
def gated(engine: Any) -> Iterator[Callable[[int], None]]:
    """Lets the scripted model make so many steps more."""
    steps = threading.Semaphore(0)
    engine.model.before = steps.acquire
    try:
        yield steps.release
    finally:
        engine.model.before = lambda: None
        steps.release(1)


# ---- what is loaded


def test_it_loads_without_a_complaint_and_asks_nobody_else(busy: Served, open_tab: Any) -> None:
    tab = open_tab(busy).connected()
    tab.fill_batch()
    tab.page.click("#to-policies")
    tab.page.wait_for_selector("#lanes svg")
    tab.page.click("#to-live")
    assert tab.complaints == [] and tab.hosts == {urlsplit(busy.url).netloc}
    assert tab.text("#model") == "tiny/bytes"


def test_the_policy_of_the_page_forbids_inline_scripts_and_other_hosts(busy: Served, open_tab: Any) -> None:
    tab = open_tab(busy).connected()
    tab.page.evaluate("""() => { window.barred = [];
        addEventListener("securitypolicyviolation", (event) => barred.push(event.effectiveDirective));
        const script = document.createElement("script"); script.textContent = "window.hacked = 1";
        document.body.append(script);
        const image = new Image(); image.src = "http://127.0.0.2:9/x.png"; document.body.append(image);
        fetch("http://127.0.0.2:9/").catch(() => {}); }""")
    tab.wait("() => barred.length >= 3")
    assert set(tab.page.evaluate("barred")) == {"script-src-elem", "img-src", "connect-src"}
    assert tab.page.evaluate("window.hacked") is None


# ---- the chat


def test_the_chat_streams_an_answer(open_tab: Any) -> None:
    """It is shown while it is made, and the next question carries the conversation."""
    engine = make_engine(writes("\nHelo, wrd"))
    with serve(engine, live=True) as served, gated(engine) as let:
        tab = open_tab(served).connected()
        tab.page.fill("#prompt", "say it")
        tab.page.click("#send")
        let(5)
        tab.wait("() => document.querySelector('.turn.assistant p')?.textContent === 'Helo,'")
        assert tab.page.is_disabled("#send") and tab.page.is_enabled("#stop")
        assert tab.page.get_attribute("#log", "aria-busy") == "true"
        let(100)
        tab.wait("() => document.querySelector('.turn.assistant p').textContent === 'Helo, wrd'")
        tab.page.wait_for_selector("#send:enabled")
        assert tab.text(".turn.user p") == "say it" and tab.text(".turn.assistant .who") == "tiny/bytes"
        with tab.page.expect_request("**/v1/chat/completions") as asked:
            tab.page.fill("#prompt", "again")
            tab.page.keyboard.press("Enter")
        messages = json.loads(asked.value.post_data)["messages"]
        assert [message["content"] for message in messages] == ["say it", "Helo, wrd", "again"]
        assert tab.complaints == []


def test_an_answer_is_stopped_and_its_request_leaves(open_tab: Any) -> None:
    """F2, from the page: what the visitor stops costs the engine nothing more."""
    engine = make_engine(writes("\nHelo, wrd", then=ids("H")[0]))  # for ever
    with serve(engine, live=True) as served, gated(engine) as let:
        tab = open_tab(served).connected()
        tab.page.fill("#prompt", "say it")
        tab.page.keyboard.press("Enter")
        let(3)
        tab.wait("() => document.querySelector('.turn.assistant p')?.textContent.startsWith('He')")
        tab.page.click("#stop")
        tab.page.wait_for_selector("#send:enabled")
        while engine.busy:
            let(1)
            tab.page.wait_for_timeout(50)
        assert len(engine.model.steps) < 100  # of 160 tokens
        tab.wait("() => !document.querySelector('.row[data-state=decode]')")


def test_markup_stays_text(open_tab: Any) -> None:
    """From the visitor and from the model."""
    engine = make_engine(writes("\n<img src=x>"))
    hostile = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>'
    with serve(engine, live=True) as served:
        tab = open_tab(served).connected()
        tab.page.fill("#prompt", hostile)
        tab.page.keyboard.press("Enter")
        tab.wait("() => document.querySelector('.turn.assistant p')?.textContent === '<img src=x>'")
        assert tab.text(".turn.user p") == hostile
        assert tab.page.evaluate("[document.images.length, window.hacked ?? null]") == [0, None]
        assert tab.complaints == []


def test_an_error_of_the_server_is_shown_in_its_words(busy: Served, open_tab: Any) -> None:
    tab = open_tab(busy).connected()
    tab.page.fill("#prompt", "x" * 3000)
    tab.page.keyboard.press("Enter")
    assert re.search(r"there is room for 2300", tab.page.inner_text(".turn.error p"))
    tab.page.wait_for_selector("#send:enabled")


def test_the_key_is_asked_for_and_sent(open_tab: Any) -> None:
    engine = make_engine(writes("\nHelo, wrd"))
    with serve(engine, live=True, api_key="secret") as served:
        tab = open_tab(served)
        for key in ("wrong", "secret"):
            tab.page.wait_for_selector("#key-form:not([hidden])")
            tab.page.fill("#key", key)
            tab.page.keyboard.press("Enter")
        tab.connected()
        assert tab.page.is_hidden("#key-form") and tab.page.input_value("#key") == ""
        tab.page.fill("#prompt", "say it")
        tab.page.keyboard.press("Enter")
        tab.wait("() => document.querySelector('.turn.assistant p')?.textContent === 'Helo, wrd'")
        tab.page.click("#to-policies")
        tab.page.wait_for_selector("#lanes svg")


def test_a_server_that_drains_is_said_to_be_gone(open_tab: Any) -> None:
    with serve(make_engine(writes("\nHelo, wrd")), live=True) as served:
        tab = open_tab(served).connected()
    tab.page.wait_for_selector(".link:not(.good)")
    assert "trying again" in tab.text("#link")


# ---- the batch


def shown(tab: Tab) -> dict[str, Any]:
    """What the page says of the step it shows."""
    return tab.page.evaluate("""() => {
        const all = (selector) => [...document.querySelectorAll(selector)];
        const text = (element) => element.textContent;
        return {
            twin: text(all("#twin")[0]),
            running: Number(text(all("#t-running")[0])),
            waiting: Number(text(all("#t-waiting")[0])),
            rows: all(".row:not([data-state=ended]) .id").map(text).sort(),
            letters: all(".tag:enabled").map(text).sort(),
            cells: all("#grid .cell").map((cell) => [cell.className.split(" ")[1], text(cell)]),
            table: all("#table tbody tr").map((line) => [...line.cells].map(text)),
        };
    }""")


def listen(url: str, ready: threading.Event, steps: dict[int, list[Any]]) -> None:
    """What another watcher is told, by step; ends with the server."""
    with httpx.stream("GET", f"{url}/live/steps", timeout=60) as response:
        ready.set()
        for line in response.iter_lines():
            if line.startswith('data: {"step":'):
                step = json.loads(line.removeprefix("data: "))
                steps.setdefault(step["step"], []).append(step)


def test_a_replay_shows_the_numbers_that_were_told(busy: Served, open_tab: Any) -> None:
    """The slider goes back to earlier steps: counts, letters, every block and the table are those of a second watcher,
    and the same again when it comes back to them."""
    told: dict[int, list[Any]] = {}
    ready = threading.Event()
    threading.Thread(target=listen, args=(busy.url, ready, told), daemon=True).start()
    assert ready.wait(10)
    tab = open_tab(busy).connected()
    tab.brake.pace = 0.004
    tab.page.click("#fill")
    tab.wait("() => document.querySelector('#fill-note').textContent === 'All twelve have ended.'")
    tab.page.click("#as-table")
    tab.page.click("#pause")
    assert tab.text("#pause") == "Go on"
    last = int(tab.page.get_attribute("#slider", "max"))
    assert last > 10
    seen: dict[int, Any] = {}
    kinds = set()
    for position in [*range(0, last + 1, max(1, last // 12)), last // 2, 1]:
        tab.page.evaluate("(value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }", position)
        now = shown(tab)
        number = int(re.match(r"step (\d+|–)", now["twin"]).group(1).replace("–", "0"))  # type: ignore[union-attr]
        if number not in told:
            continue  # the other one was told of a step beside it
        assert seen.setdefault(position, now) == now
        # between two steps, others may have come: then the same step was told of twice
        step = next(one for one in told[number] if one["n_waiting"] == now["waiting"])
        kinds |= check(now, step)
    assert len(seen) > 8 and kinds >= {"shared", "own", "cached", "free"}
    tab.page.click("#pause")
    assert tab.text("#slider-note") == "live" and tab.complaints == []
    tab.page.evaluate("() => { slider.value = 1; slider.dispatchEvent(new Event('input')); }")
    assert tab.text("#pause") == "Go on" and shown(tab) == seen[1], (
        "who moves the slider sees that step, and stays there"
    )


def check(now: dict[str, Any], step: dict[str, Any]) -> set[str]:
    """The page's numbers against the server's. Returns the kinds of blocks that were there."""
    held: dict[int, list[int]] = {}
    for one in step["running"]:
        for first, n in one["blocks"]:
            for block in range(first, first + n):
                held.setdefault(block, []).append(one["row"])
    kept = {block for first, n in step["blocks"]["kept"] for block in range(first, first + n)}
    shared = sum(len(rows) > 1 for rows in held.values())
    letters = "ABCDEFGH"
    right = []
    for block in range(1000):
        rows = held.get(block, [])
        if len(rows) > 1:
            right.append(["shared", str(len(rows))])
        elif rows:
            right.append(["own", letters[rows[0]]])
        else:
            right.append(["cached", "·"] if block in kept else ["free", ""])
    assert now["cells"] == right
    tokens = sum(line[3] + line[4] for line in step["lines"][-1:])
    part = f"{len(step['running'])} running, {step['n_waiting']} waiting, "
    assert part in now["twin"] and f", {len(held):,} of 1,000 blocks held, {shared} shared" in now["twin"]
    assert not step["lines"] or f", {tokens:,} of 512 tokens in the step" in now["twin"].replace(part, ", ")
    assert (now["running"], now["waiting"]) == (len(step["running"]), step["n_waiting"])
    assert now["letters"] == sorted(letters[one["row"]] for one in step["running"])
    assert now["rows"] == sorted(f"#{one['id']}" for one in step["running"] + step["waiting"])
    by_id = {line[0]: line for line in now["table"]}
    for one in step["running"]:
        line = by_id[f"#{one['id']}"]
        numbers = [one["prompt"], one["computed"], one["output"], one["step"], sum(n for _, n in one["blocks"])]
        assert [int(cell) for cell in line[3:8]] == numbers and line[1] == letters[one["row"]]
    return {kind for kind, _ in right}


def test_the_rows_of_the_twelve_appear_and_end(busy: Served, open_tab: Any) -> None:
    tab = open_tab(busy).connected()
    tab.page.evaluate("""() => { window.seen = new Map();
        new MutationObserver(() => { for (const row of document.querySelectorAll(".row")) {
            const states = seen.get(row.querySelector(".id").textContent) ?? new Set();
            seen.set(row.querySelector(".id").textContent, states.add(row.dataset.state)); } })
          .observe(document.querySelector("#rows"), { subtree: true, childList: true, attributes: true }); }""")
    tab.brake.pace = 0.004
    tab.page.click("#fill")
    tab.wait("() => document.querySelector('#fill-note').textContent === 'All twelve have ended.'")
    states = tab.page.evaluate("[...seen.values()].map((states) => [...states])")
    assert len(states) >= 12  # one may have been told of as ended before
    assert {state for one in states for state in one} >= {"waiting", "decode", "ended"}
    strip = tab.page.evaluate(
        "['#strip-decode', '#strip-prefill'].map((id) => document.querySelector(id).getAttribute('d'))"
    )
    assert all(path.count("z") > 0 for path in strip)


# ---- every kind of visitor


def test_everything_is_reached_by_keyboard(busy: Served, open_tab: Any) -> None:
    tab = open_tab(busy).connected()
    keys = tab.page.keyboard
    reached = []

    def go_to(name: str) -> None:
        for _ in range(80):
            keys.press("Tab")
            here = tab.page.evaluate("""() => { const e = document.activeElement; const s = getComputedStyle(e);
                return [e.id, s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0]; }""")
            if here[0]:
                assert here[1], f"{here[0]} does not show that it has the focus"
                reached.append(here[0])
            if here[0] == name:
                return
        raise AssertionError(f"Tab never comes to {name}")

    go_to("prompt")
    keys.type("hello")
    keys.press("Enter")
    tab.page.wait_for_selector(".turn.user")
    go_to("fill")
    tab.brake.arm()
    keys.press("Space")
    tab.wait("() => document.querySelectorAll('.row[data-state=decode]').length >= 2")
    go_to("pause")
    keys.press("Space")
    step = tab.text("#twin")
    go_to("slider")
    keys.press("Home")
    assert tab.text("#twin") != step
    keys.press("ArrowRight")
    assert tab.page.get_attribute("#slider", "aria-valuetext") == tab.text("#slider-note")
    go_to("say")
    keys.press("Enter")
    assert tab.text("#announce") == tab.text("#twin")
    go_to("as-table")
    keys.press("Enter")
    assert tab.page.is_visible("#table") and tab.page.is_hidden("#rows-box")
    assert {"to-live", "to-policies", "clear", "log", "max-tokens"} <= {*reached}
    tab.page.evaluate("document.querySelector('#to-policies').focus()")
    keys.press("Enter")
    tab.page.wait_for_selector("#lanes svg")
    go_to("play")
    go_to("clock")
    before = tab.text("#clock-note")
    keys.press("End")
    assert tab.text("#clock-note") != before


def test_a_letter_outlines_the_blocks_of_its_request(busy: Served, open_tab: Any) -> None:
    tab = open_tab(busy).connected()
    tab.fill_batch()
    tab.page.click("#pause")
    tag = tab.page.locator(".tag:enabled").first
    tag.focus()
    tab.page.keyboard.press("Enter")
    assert tag.get_attribute("aria-pressed") == "true"
    tab.page.click("#as-table")
    letter = tag.text_content()
    lines = {line[1]: line for line in shown(tab)["table"]}
    assert tab.page.locator("#grid .mine").count() == int(lines[letter][7])
    texts = set(tab.page.locator("#grid .mine").all_text_contents())
    assert all(text == letter or text.isdigit() for text in texts)


def test_nothing_moves_for_those_who_asked_for_that(busy: Served, open_tab: Any) -> None:
    tab = open_tab(busy, reduced_motion="reduce").connected()
    tab.fill_batch()
    durations = "() => [...document.querySelectorAll('*')].map((e) => getComputedStyle(e).transitionDuration)"
    assert set(tab.page.evaluate(durations)) == {"0s"}
    tab.page.click("#to-policies")
    tab.page.wait_for_selector("#lanes svg")
    until = re.fullmatch(r"(.*) of (.*) s", tab.text("#clock-note"))
    assert until and until[1] == until[2], "the end of the run is shown, and nothing plays"
    assert tab.text("#play") == "Play"
    moving = open_tab(busy)
    moving.connected().fill_batch()
    assert set(moving.page.evaluate(durations)) != {"0s"}


def test_a_phone_needs_no_sideways_scrolling(busy: Served, open_tab: Any) -> None:
    tab = open_tab(busy, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True).connected()
    tab.fill_batch()
    beyond = """() => [...document.querySelectorAll("button, input, textarea, h2, p, svg")]
        .filter((e) => e.checkVisibility() && !e.closest(".scroll, .away, .skip"))
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.id || e.className)"""
    for click in (None, "#as-table", "#to-policies"):
        if click:
            tab.page.click(click)
        if click == "#to-policies":
            tab.page.wait_for_selector("#lanes svg")
        for width in (390, 320):
            tab.page.set_viewport_size({"width": width, "height": 844})
            tab.page.wait_for_timeout(50)
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.page.evaluate(beyond) == []


def test_states_are_told_apart_without_colour(busy: Served, open_tab: Any) -> None:
    """Each state has a sign and words, each kind of block a letter, a number, a dot or nothing; areas have patterns."""
    tab = open_tab(busy).connected()
    tab.fill_batch()
    tab.page.click("#pause")
    rows = tab.page.evaluate("""() => [...document.querySelectorAll(".row")].map((row) =>
        [row.dataset.state, row.querySelector(".sign").textContent, row.querySelector(".words").textContent])""")
    assert rows and all(sign == SIGNS[state] and words for state, sign, words in rows)
    forms = {"own": r"[A-Za-z]{1,2}", "shared": r"[2-9]|[1-9][0-9]|\+", "cached": "·", "free": ""}
    cells = shown(tab)["cells"]
    assert {kind for kind, _ in cells} >= {"own", "shared"}
    assert all(re.fullmatch(forms[kind], text) for kind, text in cells)
    fills = "(one) => getComputedStyle(document.querySelector(one)).backgroundImage"
    assert "repeating-linear-gradient" in tab.page.evaluate(fills, ".sw.prefill")
    assert "repeating-linear-gradient" in tab.page.evaluate(fills, ".row:not([data-state=ended]) .done")
    assert tab.page.evaluate(fills, ".sw.decode") == "none"
    assert tab.page.get_attribute("#strip-prefill", "fill") == "url(#hatch)"
    assert tab.page.get_attribute("#strip-decode", "fill") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(busy: Served, open_tab: Any, scheme: str) -> None:
    """WCAG's contrast of at least 4.5 for text, in both schemes."""
    tab = open_tab(busy, color_scheme=scheme).connected()
    names = ["ground", "panel", "ink", "soft", "accent", "on-accent", "wash", "empty", "bad", "good"]
    names += [f"h{i}" for i in range(1, 9)]
    found = """(name) => {
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.color = `var(--${name})`;
        return getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
    }"""
    colours = {f"--{name}": tab.page.evaluate(found, name) for name in names}
    pairs = [("--ink", ground) for ground in ("--ground", "--panel", "--wash", *(f"--h{i}" for i in range(1, 9)))]
    pairs += [("--soft", "--panel"), ("--soft", "--ground"), ("--soft", "--empty"), ("--panel", "--ink")]
    pairs += [("--on-accent", "--accent"), ("--bad", "--ground"), ("--good", "--panel"), ("--accent", "--panel")]
    for front, back in pairs:
        assert contrast(colours[front], colours[back]) >= 4.5, (front, back)


def contrast(one: list[float], other: list[float]) -> float:
    """Of two sRGB colours from 0 to 255, as WCAG 2 defines it."""

    def luminance(rgb: list[float]) -> float:
        linear = [c / 255 / 12.92 if c <= 0.04045 * 255 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# ---- three policies


def test_the_policies_show_what_was_simulated(busy: Served, open_tab: Any) -> None:
    """At any time: who has ended, who works, who waits, by number; and the figures of the whole run."""
    tab = open_tab(busy, "/#policies").connected()
    for name, value in (("seed", 5), ("slots", 3), ("requests", 17)):
        tab.page.fill(f"#{name}", str(value))
    tab.page.click("text=Simulate")
    run = compare.compare(5, 3, 17)
    tab.wait("() => document.querySelectorAll('.policy').length === 3 && lanes.textContent.includes('of 17 ended')")
    until = max(policy["figures"]["makespan"] for policy in run["policies"])
    for part in (0, 250, 500, 1000):
        tab.page.evaluate("(part) => { clock.value = part; clock.dispatchEvent(new Event('input')); }", part)
        at = until * part / 1000
        states = tab.page.locator(".policy .state").all_text_contents()
        queues = tab.page.evaluate(
            """[...document.querySelectorAll('.queue')].map(
            (queue) => [...queue.querySelectorAll('.chip')].map((chip) => Number(chip.textContent)))"""
        )
        for policy, state, queue in zip(run["policies"], states, queues, strict=True):
            ended = sum(one["end"] <= at for one in policy["requests"])
            work = sum(one["start"] <= at < one["end"] for one in policy["requests"])
            waits = [i + 1 for i, one in enumerate(policy["requests"]) if one["arrival"] <= at < one["start"]]
            assert state.startswith(f"{ended} of 17 ended, {work} work, {len(waits)} wait"), (part, state)
            assert queue == waits[:16]
    table = tab.page.evaluate(
        """[...document.querySelectorAll('#figures tbody tr')].map(
        (line) => [...line.cells].map((cell) => cell.textContent))"""
    )
    for policy, line in zip(run["policies"], table, strict=True):
        assert line[0].lower() == policy["name"] and line[1] == f"{policy['figures']['mean_wait']:.2f} s"
    assert tab.complaints == []


def test_a_wrong_number_of_slots_is_answered_in_words(busy: Served, open_tab: Any) -> None:
    tab = open_tab(busy, "/#policies").connected()
    tab.page.wait_for_selector("#lanes svg")
    tab.page.evaluate("document.querySelector('#policy-form').noValidate = true")
    tab.page.fill("#slots", "99")
    tab.page.click("text=Simulate")
    tab.wait("() => document.querySelector('#policy-error').textContent.includes('slots')")
