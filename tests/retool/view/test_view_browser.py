"""The page in a real headless Chromium: what it shows, its keyboard, its speed, and that hostile text runs nothing."""

import json
import os
import shutil
import statistics
import subprocess
import time

import pytest
from browser import CHROMIUM, Browser
from retool import chat
from view.load import Rollout
from view.page import KATEX, PARTS, Page, katex
from view.tokens import Vocabulary
from view_helpers import BARE, INLINE, TOOL, byte_tokenizer, call_record, raw

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed: apt install chromium")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return Vocabulary(byte_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def browser():
    started = Browser()
    yield started
    started.close()


@pytest.fixture
def show(browser, tmp_path, vocabulary):
    """Opens a page of the given rollouts; the page must raise nothing, log nothing and fetch nothing."""

    def opened(*rollouts, tokens=True, name="page", math="", datasets=()):
        page = Page(vocabulary if tokens else None, math=math)
        for rollout in rollouts:
            page.add(rollout if isinstance(rollout, Rollout) else Rollout("a.pt", 0, False, rollout, []), datasets)
        path = tmp_path / "page.html"
        page.write(path, name)
        browser.size(1400, 860)
        browser.scheme("light")
        browser.open(path)
        return browser

    yield opened
    assert browser.messages == []
    assert [url for url in browser.requests if not url.startswith("file:")] == []


def group_of_four(**changes):
    return [
        raw(index=0, score=1.0),
        raw(
            index=1,
            score=-0.9,
            calls=[call_record("timeout", 10.0)],
            end="length",
            reward=dict(score=-0.9, acc=False, pred="7"),
        ),
        raw([("no call", 1)], index=2, score=-1.0, reward=dict(score=-1.0, acc=False, pred="")),
        raw(index=3, score=0.0, remove_sample=True, end="infrastructure_error", status="aborted"),
    ]


def rows(browser):
    return browser.evaluate(
        "[...document.querySelectorAll('#rows tr[data-row]')].map(r => [...r.children].map(c => c.innerText.trim()))"
    )


def numbers(browser):
    return [int(row[0]) for row in rows(browser)]


def choose(browser, select, value):
    browser.evaluate(
        f"(() => {{ const s = [...document.querySelectorAll('#filters label')].find(l => l.textContent.startsWith({select!r}))"
        f".querySelector('select'); s.value = {value!r}; s.dispatchEvent(new Event('change')) }})()"
    )


def test_the_table(show):
    browser = show(group_of_four())
    first, second, third, lost = rows(browser)
    heads = browser.texts("#heads th")
    found = dict(zip(heads, second, strict=True))
    assert (
        found["reward"] == "−0.9" and "✗" in found["right"] and found["ended by"] == "length" and found["calls"] == "T"
    )
    assert (
        "✓" in dict(zip(heads, first, strict=True))["right"] and "lost" in dict(zip(heads, lost, strict=True))["right"]
    )
    assert browser.texts("#summary") == ["4 samples · accuracy 33 % · reward −0.3 · 0.8 calls a sample"]


def test_sorting(show):
    browser = show(group_of_four())
    browser.evaluate("[...document.querySelectorAll('#heads button')].find(b => b.textContent == 'reward').click()")
    assert numbers(browser) == [2, 1, 3, 0]
    browser.evaluate("[...document.querySelectorAll('#heads button')].find(b => b.textContent == 'reward').click()")
    assert numbers(browser) == [0, 3, 1, 2]
    assert browser.evaluate("document.querySelector('[aria-sort]').textContent") == "reward"


@pytest.mark.parametrize(
    "select, value, found",
    [
        ("Result", "right", [0]),
        ("Result", "wrong", [1, 2]),
        ("Result", "lost", [3]),
        ("Ended by", "length", [1]),
        ("Call", "timeout", [1]),
        ("Call", "none", [2]),
    ],
)
def test_filters(show, select, value, found):
    browser = show(group_of_four())
    choose(browser, select, value)
    assert numbers(browser) == found
    choose(browser, select, "")
    assert numbers(browser) == [0, 1, 2, 3]


def test_the_keyboard(show):
    browser = show(group_of_four())
    chosen = "document.querySelector('.detail h2').textContent"
    assert browser.evaluate(chosen).startswith("Sample 0")
    for key, sample in [("j", 1), ("j", 2), ("k", 1), ("k", 0), ("k", 0)]:
        browser.press(key)
        browser.wait(f"{chosen}.startsWith('Sample {sample}')")
    browser.press("t")
    browser.wait("document.querySelector('.body.tokens')")
    browser.press("g")
    browser.wait("document.querySelectorAll('.column').length == 4")
    browser.press("g")
    browser.wait("!document.querySelector('.column')")
    browser.press("?")
    browser.wait("document.getElementById('keys').open")
    browser.press("Escape")
    browser.wait("!document.getElementById('keys').open")


def test_search_looks_into_transcripts(show):
    samples = [raw([(f"word{n} then needle" if n == 7 else f"word{n}", 1)], index=n) for n in range(20)]
    browser = show(samples)
    browser.press("/")
    assert browser.evaluate("document.activeElement.id") == "query"
    browser.type("NEEDLE")
    browser.wait("document.querySelectorAll('#rows tr[data-row]').length == 1")
    assert numbers(browser) == [7]
    browser.press("Enter")
    browser.wait("document.querySelector('.detail h2').textContent.startsWith('Sample 7')")
    for mode in ("text", "tokens"):  # a match over the borders of tokens is marked too
        browser.wait(f"document.querySelector('.body.{mode}') && CSS.highlights.get('search')")
        [marked] = browser.evaluate("[...CSS.highlights.get('search')].map(range => range.toString())")
        assert marked == "needle"
        browser.press("t")
    browser.press("Escape")
    browser.press("Escape")
    browser.wait("document.querySelectorAll('#rows tr[data-row]').length == 20")


def test_searched_text_is_no_pattern(show):
    browser = show([raw([("a(b[c\\d*", 1)]), raw([("abcd", 1)], index=1)])
    browser.press("/")
    browser.type("a(b[c\\d*")
    browser.wait("document.querySelectorAll('#rows tr[data-row]').length == 1")
    assert numbers(browser) == [0]


def blocks(browser):
    return browser.evaluate(
        "[...document.querySelectorAll('.body .block')].map(b => [b.className.split(' ')[1], b.querySelector('h3').innerText,"
        " b.querySelector('.content').innerText])"
    )


PARTS_SHOWN = [
    (
        'Let us see. <tool_call>\n{"name": "code_interpreter", "arguments": {"code": "x = 6\\nprint(x * 7)"}}\n</tool_call>',
        1,
    ),
    (TOOL.before + "Output:\n42" + TOOL.after, 0),
    ("oops" + chat.IM_END, 1),
    (BARE.before + "Your previous action is invalid: nothing." + BARE.after, 0),
    ("older words", 0),
    (INLINE.before + "made up" + INLINE.after, 1),
    ("Answer: \\boxed{42}" + chat.IM_END, 1),
]


def test_the_transcript(show):
    browser = show([raw(PARTS_SHOWN, calls=[call_record("error", 0.0042)])])
    found = [(kind, title.split(), text.strip()) for kind, title, text in blocks(browser)]
    assert found[0][:2] == ("prompt", ["prompt"]) and found[0][2] == "What is 6 * 7?"
    assert found[1] == ("model", ["model"], "Let us see. \nx = 6\nprint(x * 7)")
    assert found[2] == ("observation", ["output", "1", "E", "error,", "4.2", "ms"], "Output:\n42")
    assert found[4][0] == "observation" and found[4][1][:2] == ["reply", "U"] and "invalid: nothing." in found[4][2]
    assert found[5][0] == "masked" and "not trained on" in " ".join(found[5][1])
    assert found[6][0] == "hallucinated" and found[6][2] == "made up"
    assert found[7][2] == "Answer: \\boxed{42}<|im_end|>"


def test_tokens_are_shaded_and_masked_ones_are_not(show):
    sample = raw([("abc", 1), (INLINE.before + "x" + INLINE.after, 0), ("d", 1)])
    sample["rollout_log_probs"] = [-0.01, -1.0, -9.0] + [0.0] * (sample["response_length"] - 4) + [-3.5]
    browser = show([sample])
    browser.press("t")
    browser.wait("document.querySelector('.body.tokens')")
    found = browser.evaluate(
        "[...document.querySelectorAll('.t[data-token]')].map(t => [t.dataset.token, t.textContent, t.className])"
    )
    assert len(found) == sample["response_length"]
    assert [tuple(found[n][1:]) for n in (0, 1, 2, -1)] == [("a", "t"), ("b", "t h2"), ("c", "t h6"), ("d", "t h4")]
    assert {name for _, _, name in found[3:-1]} == {"t m"}
    browser.evaluate(
        "document.querySelector('[data-token=\"1\"]').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    said = browser.texts("#readout")[0]
    assert said.startswith('"b"  token 1: log-prob −1') and "p 0.37" in said


def test_without_a_tokenizer_tokens_cannot_be_chosen(show):
    browser = show([raw()], tokens=False)
    browser.press("t")
    assert browser.evaluate(
        "document.querySelector('.switch[aria-label=\"Text or tokens\"] button:last-child').disabled"
    )
    assert browser.evaluate("document.querySelector('.body.text') != null")


def test_a_group_side_by_side(show):
    browser = show([*group_of_four(), raw(index=9, group_index=5)])
    browser.press("g")
    browser.wait("document.querySelectorAll('.column').length == 4")
    facts = browser.evaluate(
        "[...document.querySelectorAll('.column')].map(c => Object.fromEntries([...c.querySelectorAll('.facts div')]"
        ".map(d => [d.querySelector('dt').innerText, d.querySelector('dd').innerText])))"
    )
    assert [float(fact["advantage"].replace("−", "-")) for fact in facts] == [1.15, -0.53, -0.62, 0]
    assert browser.evaluate("document.querySelector('.column.chosen button').textContent") == "Sample 0"


def test_a_lost_sample_says_so(show):
    browser = show(group_of_four())
    for _ in range(3):
        browser.press("j")
    browser.wait("document.querySelector('.banner')")
    assert "none of it is trained on" in browser.texts(".banner")[0]
    assert browser.evaluate(
        "getComputedStyle(document.querySelector('.lost .model .content')).backgroundImage.includes('gradient')"
    )


def test_charts_over_rollouts(show):
    def rollout(number, evaluation=False):
        return Rollout(f"{number}.pt", number, evaluation, [raw(score=number / 10)] * 3, [])

    browser = show(rollout(0), rollout(1), rollout(2), rollout(2, True))
    titles = browser.texts("#charts figcaption span")
    assert titles == ["Reward", "Accuracy", "Calls a sample", "Tokens, median and p5 to p95", "Calls that failed"]
    assert browser.texts("#charts figure:first-child title") == [
        "training 0: 0",
        "training 1: 0.1",
        "training 2: 0.2",
        "evaluation 2: 0.2",
    ]
    choose(browser, "Rollout", "1")
    assert len(rows(browser)) == 3


def test_charts_of_one_rollout(show):
    browser = show(group_of_four())
    titles = browser.texts("#charts figcaption span")
    assert titles == ["Reward", "Accuracy by calls", "Samples by calls", "Tokens", "Calls by outcome"]
    assert "0 calls: 0 % of 1 sample right" in browser.texts("#charts title")


def test_a_page_without_anything_but_text(show):
    browser = show([{"response": "hello"}], tokens=False)
    assert blocks(browser)[-1][2] == "hello"
    assert len(browser.texts("#notes li")) == 5


# --- hostile text ----------------------------------------------------------------------------------------------------

HOSTILE = [
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "<svg onload='window.ran = 1'><a href='javascript:window.ran=1'>x</a></svg>",
    "<!-- <script> --!> <style>* {display: none}</style> &lt;b&gt; </textarea></title>",
    "<iframe srcdoc='<script>parent.ran = 1</script>'></iframe><base href='https://example.com/'>",
    "<meta http-equiv=refresh content='0;url=https://example.com'><link rel=stylesheet href=https://example.com/a.css>",
    "\u202eright to left\u2066\u200f\ufeff",
    "\x00\x07\x1b[31m\x7f\r\x85",
    "\ud800 alone \udfff",
    "${alert(1)} {{constructor.constructor('window.ran=1')()}} \\u003cscript\\u003e `${window.ran = 1}`",
    "__proto__",
    "]]>--><![CDATA[",
    "</script <img src=x onerror='window.ran = 1' ",
    "</title><img src=x onerror='window.ran = 1'><script>window.ran = 1</script>",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_hostile_text_is_shown_and_runs_nothing(show, text, mode):
    metadata = raw(calls=[call_record(text)], end=text)["metadata"]
    metadata["retool"]["calls"][0]["kind"] = text
    framed = INLINE.before + text + INLINE.after
    sample = raw([(text, 1), (f"<code>{text}</code>", 1), (framed, 0), (framed, 1)], metadata=metadata, question=text)
    sample |= dict(label=text, status=text, reward=dict(score=1.0, acc=True, pred=text))
    notes = [f"note {text}"]
    browser = show(Rollout(text, 0, False, [sample, raw(prompt=[{"role": text, "content": text}])], notes), name=text)
    if mode == "tokens":
        browser.press("t")
        browser.wait("document.querySelector('.body.tokens')")
    browser.press("g")
    browser.wait("document.querySelector('.column')")
    assert browser.evaluate("window.ran === undefined && Object.prototype.ran === undefined")
    assert (
        browser.evaluate(
            "document.querySelectorAll('img, iframe, a, base, link, object, embed, form:not([method=dialog])').length"
        )
        == 0
    )
    chunks = browser.evaluate("document.querySelectorAll('script').length")
    assert chunks == 2 + 2 + 2  # index and scripts, two prompts, two samples
    if text.isprintable() and "\ud800" not in text and mode == "text":
        assert text in browser.evaluate("document.querySelector('.column .model').textContent")


def test_unseen_characters_are_written_out(show):
    browser = show([raw([("a\u202eb\x1bc", 1)])])
    assert browser.texts(".block.model .control") == ["U+202E", "␛"]


def test_the_policy_refuses_what_the_page_does_not_do(browser, tmp_path, vocabulary):
    page = Page(vocabulary)
    page.add(Rollout("a.pt", 0, False, [raw()], []))
    page.write(tmp_path / "page.html", "a")
    browser.open(tmp_path / "page.html")
    attempts = {
        "markup": "document.body.innerHTML = '<b>x</b>'",
        "a script": "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s) })()",
        "eval": "setTimeout('window.ran = 1')",
    }
    for name, attempt in attempts.items():
        with pytest.raises(AssertionError, match="(?i)trusted"):
            browser.evaluate(attempt)
            pytest.fail(f"{name} was let through")
    # Neither needs a network: only the policy can refuse them.
    assert browser.evaluate("fetch('data:,x').then(() => 'fetched', () => 'refused')") == "refused"
    picture = "data:image/svg+xml,<svg xmlns=\\'http://www.w3.org/2000/svg\\'/>"
    image = "new Promise(done => { const i = new Image(); i.onload = () => done('loaded'); i.onerror = () => done('refused');"
    assert browser.evaluate(f"{image} i.src = '{picture}' }})") == "refused"
    assert browser.evaluate("window.ran") is None


@pytest.mark.parametrize(
    "text",
    [
        "x" * 400_000,
        "<code>" * 150_000,
        "```py\n" * 150_000,
        "<|im_end|>" * 20_000,
        "\n" * 200_000 + "x",
        "\0" * 200_000,
    ]
    + ["```py\n" + "\n " * 100_000 + "x```", "a\0" * 20_000, "<|im_start|>" * 20_000],
)
def test_huge_and_repeated_text_does_not_hang(show, text):
    started = time.monotonic()
    browser = show([raw([(text, 1)]), raw(index=1)], tokens=False)
    browser.press("j")
    browser.wait("document.querySelector('.detail h2').textContent.startsWith('Sample 1')")
    assert time.monotonic() - started < 10
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


# --- links, copies, groups, evaluations ------------------------------------------------------------------------------


def group_of(scores, group, **changes):
    right = [dict(score=score, acc=score > 0, pred="") for score in scores]
    return [raw(index=8 * group + n, group_index=group, reward=one, **changes) for n, one in enumerate(right)]


def three_groups():
    return [*group_of([1, 1], 0), *group_of([-1, 1], 1, question="Q1"), *group_of([-1, -1], 2, question="Q2")]


@pytest.mark.parametrize("value, found", [("all right", [0, 1]), ("mixed", [8, 9]), ("all wrong", [16, 17])])
def test_groups_by_how_many_are_right_and_charts_of_what_is_left(show, value, found):
    browser = show(three_groups())
    choose(browser, "Group", value)
    assert numbers(browser) == found
    share = {"all right": "100 %", "mixed": "50 %", "all wrong": "0 %"}[value]
    assert browser.texts("#charts figcaption b")[1] == share and f"accuracy {share}" in browser.texts("#summary")[0]


def test_a_link_leads_to_what_was_shown(show, tmp_path):
    browser = show(three_groups())
    choose(browser, "Result", "wrong")
    browser.evaluate("[...document.querySelectorAll('#heads button')].find(b => b.textContent == 'adv.').click()")
    browser.press("j")
    for key, shown in [("g", ".column"), ("t", ".body.tokens")]:
        browser.press(key)
        browser.wait(f"document.querySelector('{shown}')")
    browser.click("#query")
    browser.evaluate(
        "(() => { const q = document.getElementById('query'); q.value = 'Q2 6';"
        " q.value = 'q2'; q.dispatchEvent(new Event('input')) })()"
    )
    browser.wait(
        "location.hash.includes('q=q2') && !document.getElementById('summary').textContent.includes('searching')"
    )
    state = (
        "[location.hash, document.querySelector('.detail h2').textContent, document.querySelector('.body').className,"
    )
    state += " document.querySelector('[aria-sort]').textContent, document.getElementById('query').value]"
    before, table = browser.evaluate(state), rows(browser)
    assert before[2:] == ["body group tokens", "adv.", "q2"] and [row[0] for row in table] == ["16", "17"]
    browser.open(tmp_path / "page.html", before[0])
    browser.wait("document.querySelector('.body.group.tokens')")
    assert (browser.evaluate(state), rows(browser)) == (before, table)
    browser.evaluate("location.hash = '#sort=nothing&sample=999&result=<b>&mix=mixed'")
    browser.wait("document.querySelectorAll('#rows tr[data-row]').length == 2")  # what there is none of is left out


def test_the_transcript_is_copied_as_it_is(show):
    browser = show([raw([("a <b> \\boxed{1}", 1)], payload_text="PROMPT a <b> \\boxed{1}")], tokens=False)
    browser.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    browser.press("y")
    browser.wait("document.getElementById('copy').textContent == 'Copied'")
    assert browser.evaluate("window.copied") == "PROMPT a <b> \\boxed{1}"


def test_the_next_match_is_in_this_sample_or_in_the_one_after_it(show):
    browser = show([raw([("x needle " * n, 1)], index=n) for n in range(3)], tokens=False)
    browser.press("/")
    browser.type("needle")
    browser.wait("document.querySelectorAll('#rows tr[data-row]').length == 2")
    browser.press("Enter")
    for sample in (1, 2):
        browser.wait(
            f"document.querySelector('.detail h2').textContent.startsWith('Sample {sample}') && "
            f"CSS.highlights.get('search')?.size == {sample}"
        )
        for _ in range(sample):
            browser.press("n")
    assert browser.evaluate("document.querySelector('.detail h2').textContent").startswith("Sample 2")


def test_the_same_problem_over_rollouts(show):
    rollouts = [Rollout(f"{n}.pt", n, False, three_groups(), []) for n in range(3)]
    browser = show(*rollouts)
    choose(browser, "Group", "mixed")
    browser.evaluate("document.querySelector('#rows tr[data-row]').click()")
    browser.wait("document.querySelector('.detail h2').textContent.startsWith('Sample 8')")
    browser.evaluate(
        "[...document.querySelectorAll('.modes button')].find(b => b.textContent == 'In 3 rollouts').click()"
    )
    assert [row[1] for row in rows(browser)] == ["Q1"] * 6
    assert browser.texts("#charts figure:nth-child(2) title") == [f"training {n}: 50 %" for n in range(3)]


def test_an_evaluation_by_dataset_and_problem(show):
    """As vime writes it: no groups, and each dataset's index starts at 0."""

    def dataset(right):
        rewards = [dict(score=float(one), acc=one, pred="") for one in right]
        return [raw(index=n, group_index=None, question=f"Q{n // 2}", reward=r) for n, r in enumerate(rewards)]

    samples = [*dataset([True, False, True, True]), *dataset([False, False, False, True])]
    browser = show(Rollout("rollout_eval_20.pt", 20, True, samples, []), datasets=["aime24"])
    heads = browser.texts("#heads th")
    found = [dict(zip(heads, row, strict=True)) for row in rows(browser)]
    assert [(row["rollout"], row["group"], row["pass"]) for row in found] == [
        *[("e20 aime24", "0", "1/2")] * 2, *[("e20 aime24", "1", "2/2")] * 2,
        *[("e20 dataset 2", "0", "0/2")] * 2, *[("e20 dataset 2", "1", "1/2")] * 2,
    ]  # fmt: skip
    assert {row["adv."] for row in found} == {"–"}  # nothing of it is trained on
    browser.press("g")
    browser.wait("document.querySelectorAll('.column').length == 2")
    choose(browser, "Dataset", "aime24")
    assert len(rows(browser)) == 4 and "accuracy 75 %" in browser.texts("#summary")[0]


# --- mathematics -----------------------------------------------------------------------------------------------------

FORMULAS = {
    "$x^2$": "x2",
    "\\(\\frac{a}{b}\\)": "ab",
    "$$\\mathbb{R}$$": "ℝ",
    "\\[ \\sqrt{2} \\]": "2",
    "\\boxed{\\frac12}": "12",
}
NO_FORMULAS = [
    "it costs $5 and $6", "$", "$$", "\\[ open", "\\boxed{", "$\\undefined{x}$", "$\\href{javascript:window.ran=1}{x}$",
    "$\\includegraphics{http://example.com/a.png}$", "\\(\\htmlStyle{color: red}{x}\\)", "$\\def\\a{\\a\\a}\\a$",
    "$\\url{http://example.com}$", "$\\htmlData{a=b}{x}$",
]  # fmt: skip


@pytest.mark.parametrize("with_katex", [True, False])
def test_formulas_are_drawn_and_all_else_stays_text(show, with_katex):
    assert katex(), f"the tests need {KATEX}"
    browser = show(
        [raw([("\n\n".join([*FORMULAS, *NO_FORMULAS]) + chat.IM_END, 1)])], math=katex() if with_katex else ""
    )
    if with_katex:
        browser.wait("document.querySelector('.model math')")
    drawn = browser.evaluate(
        "[...document.querySelectorAll('.model .math')].filter(m => m.querySelector('math')).map(m =>"
        " [m.title, m.querySelector('semantics').firstChild.textContent])"
    )
    assert dict(drawn) == (FORMULAS if with_katex else {})
    said = browser.evaluate("document.querySelector('.model .content').textContent")
    assert all(text in said for text in NO_FORMULAS)
    assert browser.evaluate(
        "window.ran === undefined && !document.querySelector('.model [href], .model [src], .model img')"
    )
    if with_katex:
        browser.press("m")
        browser.wait("!document.querySelector('.model math')")
    assert "$x^2$" in browser.evaluate("document.querySelector('.model .content').textContent")


# --- looks and access ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1400, 1024])
def test_the_problem_is_the_widest_column_and_titles_do_not_overlap(show, width):
    long = "Let $n$ be the smallest positive integer that " + "is divisible by 7 and " * 20 + "ends in 3."
    samples = [raw(index=n, question=long, calls=[call_record(o) for o in LONG_OUTCOMES]) for n in range(8)]
    for rollouts in ([samples], [samples, samples]):
        browser = show(*(Rollout(f"{n}.pt", n, False, one, []) for n, one in enumerate(rollouts)))
        browser.size(width, 768)
        widths = dict(
            browser.evaluate("[...document.querySelectorAll('#heads th')].map(h => [h.textContent, h.offsetWidth])")
        )
        assert max(widths, key=widths.get) == "problem" and widths["problem"] >= 160, widths
        assert browser.evaluate("document.querySelector('#rows .problem').title") == long
        assert browser.evaluate(
            "document.querySelector('.scroller').scrollWidth <= document.querySelector('.scroller').clientWidth"
        )
        assert browser.evaluate(OVERLAPS) == []


LONG_OUTCOMES = ["ok", "too_long", "not_found", "invalid", "crashed", "refused", "timeout", "memory", "error"]
OVERLAPS = """(() => {
  const overlaps = [];
  for (const figure of document.querySelectorAll('#charts figure')) {
    const boxes = [...figure.querySelectorAll('figcaption > *, text')].map(e => [e.textContent, e.getBoundingClientRect()]);
    const outside = figure.getBoundingClientRect();
    boxes.forEach(([name, a], at) => {
      if (a.right > outside.right + 1 || a.left < outside.left - 1) overlaps.push(name);
      for (const [other, b] of boxes.slice(at + 1))
        if (a.left < b.right && b.left < a.right && a.top + 1 < b.bottom && b.top + 1 < a.bottom) overlaps.push([name, other]);
    });
  }
  return overlaps;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_text_can_be_read(show, scheme, width):
    """WCAG's contrast of all text over its background: 4.5, and 3 for the letters in the squares of calls."""
    browser = show([raw(PARTS_SHOWN, calls=[call_record(o) for o in ("ok", "timeout")], index=n) for n in range(4)])
    browser.scheme(scheme)
    browser.size(width, 800)
    browser.press("j")
    browser.wait("document.querySelector('.detail h2').textContent.startsWith('Sample 1')")
    low = browser.evaluate(CONTRAST)
    assert low == [], json.dumps(low, indent=1, ensure_ascii=False)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


CONTRAST = """(() => {
  const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return { rgb: [r, g, b], a } };
  const light = ({ rgb }) => { const [r, g, b] = rgb.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const behind = (element) => { for (let e = element; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.a > 0.99) return c } return parse('rgb(255, 255, 255)') };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !element.checkVisibility({ visibilityProperty: true }) || element.closest('script, style, noscript, option, svg')) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (element.matches('.call') ? 3 : 4.5) && !element.matches(':disabled')) low.push([element.tagName, element.className, element.textContent.slice(0, 30), ratio]);
  }
  return low;
})()"""


def test_everything_has_a_name(show):
    browser = show(group_of_four())
    nameless = browser.evaluate(
        "[...document.querySelectorAll('button, input, select, [role=img], [role=region], article, section')].filter(e =>"
        " !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label'))).map(e => e.outerHTML)"
    )
    assert nameless == []


def test_narrow_the_sample_covers_the_table_until_one_goes_back(show):
    browser = show(group_of_four())
    browser.size(390, 800)
    visible = "getComputedStyle(document.querySelector('.detail')).visibility"
    assert browser.evaluate(visible) == "hidden"
    browser.click("#rows tr[data-row] td")
    browser.wait(f"{visible} == 'visible'")
    browser.click(".back")
    assert browser.evaluate(visible) == "hidden"


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed: apt install nodejs")
def test_the_script_is_well_formed():
    ran = subprocess.run(["node", "--check", str(PARTS / "page.js")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# --- speed -----------------------------------------------------------------------------------------------------------

MAX_OPEN_SECONDS = 3.0
MAX_FRAME_MS = 50.0  # the median while scrolling; 16.7 is a screen's own


@pytest.mark.skipif(
    os.environ.get("RETOOL_ALL_TESTS") != "1", reason="makes 16 million tokens: set RETOOL_ALL_TESTS=1, or run run.sh"
)
def test_two_thousand_samples_of_eight_thousand_tokens(browser, tmp_path, vocabulary, record_property):
    import random

    rng = random.Random(0)
    words = [
        "so",
        "the sum",
        "of all",
        "divisors",
        "is",
        "we",
        "check",
        "mod",
        "n",
        "+",
        "=",
        "prime",
        "\n",
        "3",
        "17",
    ]

    def sample(number):
        half = ""
        while len(half) < 3950:
            half += f"{rng.choice(words)} {rng.randrange(100)} "
        made = raw([(half[:3950], 1), (INLINE.before + "42" + INLINE.after, 0), (half[:4000], 1)])
        made["rollout_log_probs"] = [-rng.expovariate(3) for _ in range(made["response_length"])]
        return made | dict(index=number, group_index=number // 8)

    distinct = [sample(number) for number in range(100)]
    samples = [distinct[number % 100] | dict(index=number, group_index=number // 8) for number in range(2000)]
    page = Page(vocabulary)
    page.add(Rollout("big.pt", 0, False, samples, []))
    page.write(tmp_path / "page.html", "big")
    browser.size(1400, 860)
    opened = min(browser.open(tmp_path / "page.html") for _ in range(3))
    assert browser.evaluate("document.getElementById('summary').textContent").startswith("2,000 samples")
    frames = {}
    for where, by in (("#scroller", 400), (".body", 120)):
        frames[where] = statistics.median(browser.evaluate(SCROLL % (where, by)))
    record_property("open_seconds", opened)
    record_property("frame_ms", frames)
    print(
        f"{(tmp_path / 'page.html').stat().st_size >> 20} MB open in {opened:.2f} s, frames while scrolling {frames}"
    )
    assert opened < MAX_OPEN_SECONDS
    assert max(frames.values()) < MAX_FRAME_MS


SCROLL = """(async () => {
  const box = document.querySelector('%s'), times = [];
  let last = performance.now();
  for (let step = 0; step < 90; step++) {
    box.scrollTop += %d;
    await new Promise(done => requestAnimationFrame(done));
    times.push(performance.now() - last);
    last = performance.now();
  }
  return times;
})()"""
