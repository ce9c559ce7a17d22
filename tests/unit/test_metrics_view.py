"""The page of rollouts: what it holds, and how it behaves in a real browser."""

import json
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from rlcore.metrics import view
from tests import browser

HOSTILE = "</script><img src=http://nowhere.invalid/x onerror=\"document.title='broken'\">"

needs_browser = pytest.mark.skipif(browser.PROGRAM is None, reason=browser.MISSING)


def _row(step: int, group: int, k: int, **more: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "id": f"t{group}.{k}",
        "dataset": "math" if group % 2 else "code",
        "prompt": f"what is {group} & {k}? <b>",
        "answer": "7",
        "response": f"it is {step} {HOSTILE}",
        "score": float(k % 2),
        "error": "",
        "num_tokens": 4 + k,
        "finish": "stop",
    }
    return row | more


def _tokens(pieces: list[str], logps: list[float], **more: Any) -> dict[str, Any]:
    half = len(pieces) // 2
    versions = [[3, half], [4, len(pieces) - half]]
    return {"pieces": pieces, "logps": logps, "versions": versions, **more}


def _run(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rollouts.jsonl").write_text(lines)
    return folder


def test_the_page_holds_every_row_and_no_text_of_a_model_as_html(tmp_path):
    rows = [_row(step, step * 2 + g, k) for step in (1, 2) for g in range(2) for k in range(3)]
    path, count = view.write(_run(tmp_path / "run", rows))
    page = path.read_text()
    assert count == 12 and HOSTILE not in page and "<img" not in page
    found = []
    for part in page.split('id="texts-')[1:]:
        found += json.loads(zlib.decompress(b64decode(part.partition(">")[2].partition("<")[0])))
    assert [r["response"] for r in found] == [r["response"] for r in rows]


def test_the_last_steps_alone_are_taken_and_a_run_without_rollouts_is_refused(tmp_path):
    run = _run(tmp_path / "run", [_row(step, step, 0) for step in range(1, 6)])
    assert view.write(run, tmp_path / "x.html", last=2)[1] == 2
    with pytest.raises(ValueError, match="no rollouts.jsonl with responses"):
        view.write(tmp_path)


@needs_browser
def test_a_reader_finds_a_response_and_sees_its_tokens_in_colour(tmp_path):
    rows = [_row(step, step * 2 + g, k) for step in range(1, 4) for g in range(2) for k in range(3)]
    pieces = ["it", " is", "\n", "\U0001f642"]
    drafted = [[0, 3], [1, 1]]
    rows[-1] |= {
        "response": "it is\n\U0001f642 needle",
        "num_tokens": 6,
        "error": "timeout",
        "tokens": _tokens(pieces, [0.0, -0.7, -5.0, -0.1], drafted=drafted),
    }
    path, _ = view.write(_run(tmp_path / "run", rows))
    with browser.Browser(tmp_path) as page:
        page.open(path)
        page.until("document.querySelector('#response') !== null")
        assert page.js("document.title") == "run"
        assert page.js("count.textContent") == "6 of 18 responses, mean score 0.333"
        page.js("document.querySelector('#before').click()")
        page.until("document.querySelector('#response')?.textContent.startsWith('it is 2')")
        page.js("query.value = 'NEEDLE'; query.oninput()")
        page.until("count.textContent.startsWith('0 of')")
        page.js("document.querySelector('#all').click()")
        page.until("count.textContent.startsWith('1 of') && document.querySelector('.found')")
        spans = "[...document.querySelectorAll('#response span[data-k]')]"
        assert page.js(f"{spans}.map(s => s.textContent)") == pieces
        assert page.js("document.querySelector('#response').textContent").endswith(" needle")
        reddest = page.js(f"{spans}.map(s => Number(s.style.background.match(/[.0-9]+(?=\\))/)))")
        assert reddest.index(max(reddest)) == 2 and reddest[0] == 0
        page.js("document.querySelector('input[value=version]').click()")
        assert "version 3version 4" in page.js("keys.textContent")
        page.js("document.querySelector('input[value=draft]').click()")
        assert "1 of 4" in page.js("keys.textContent")
        page.js("$('query').value = ''; $('low').value = 1; $('low').onchange()")
        page.until("count.textContent == '6 of 18 responses, mean score 1.000'")
        assert [r for r in page.requests if not r.startswith("file:")] == []
        assert page.errors == [] and page.js("document.title") == "run"


def _turn(parent: int, context: list[Any], sampled: list[Any], n: int, **more: Any) -> Any:
    turn = {"row": 0, "parent": parent, "context": context, "sampled": sampled}
    return turn | {"num_context": 5, "num_tokens": n} | more


CALL = '<tool_call>{"name": "grow"}</tool_call>'
EPISODE = [
    _turn(-1, [["system", "Be brief."], ["user", "hello"]], [[False, "go "], [True, CALL]], 3),
    _turn(0, [["tool", HOSTILE]], [[False, "up"]], 1),
    _turn(1, [["", "more"]], [[False, "needle"]], 2),
    _turn(0, [["user", "other"]], [[False, "left"]], 1, row=1),
    _turn(-1, [["user", "part"]], [[False, "sub"]], 1, row=2, same=[0, 1]),
    _turn(4, [["user", "on"]], [[False, "end"]], 1, row=2),
]
PIECES = ["go", " ", CALL, "up", "nee", "dle", "left", "sub", "end"]


def _episode(has_tokens: bool) -> dict[str, Any]:
    row = _row(1, 1, 0, finish="turns", response="go up needle", num_tokens=50, advantage=-0.25)
    row["turns"] = EPISODE
    if has_tokens:
        row["tokens"] = _tokens(PIECES, [-k / 10 for k in range(len(PIECES))])
    return row


@needs_browser
@pytest.mark.parametrize("has_tokens", [False, True], ids=["text", "tokens"])
def test_an_episode_is_a_tree_of_its_turns(tmp_path, has_tokens):
    path, _ = view.write(_run(tmp_path / "run", [_episode(has_tokens)]))
    with browser.Browser(tmp_path) as page:
        page.open(path)
        page.until("document.querySelectorAll('.turn').length == 6")

        def texts(selector: str) -> list[str]:
            return page.js(f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)")

        below = "[...document.querySelectorAll('.turn')].map(e => e.dataset.turn)"
        assert page.js(below) == ["0", "3", "1", "2", "4", "5"]
        inside = "[...document.querySelectorAll('.branch .turn')].map(e => e.dataset.turn)"
        assert page.js(inside) == ["3", "4", "5"]
        assert texts(".branch > .name") == [
            "row 1: continues turn 0",
            "row 2: a conversation of its own",
        ]
        assert texts(".sampled") == [f"go {CALL}", "left", "up", "needle", "sub", "end"]
        assert texts(".call") == [CALL]
        assert texts(".role") == [
            *("system", "user", "user", "tool", "context", "1 message as in turn 0", "user", "user")
        ]
        assert HOSTILE in texts(".context")[2]
        assert texts("#rows .dim") == ["row 0: 6 sampled", "row 1: 1 sampled", "row 2: 2 sampled"]
        places = "[...document.querySelectorAll('#rows button')].map(e => e.style.gridArea)"
        assert [p.split(" / ")[:2] for p in page.js(places)] == [
            *(["1", "2"], ["1", "3"], ["1", "4"], ["2", "3"], ["3", "2"], ["3", "3"])
        ]
        assert "score 0, advantage -0.25" in page.js("$('detail').textContent")
        assert "end: turns" in page.js("$('detail').textContent")
        page.js("$('query').value = 'NEEDLE'; $('query').oninput()")
        page.until("document.querySelector('.found') && count.textContent.startsWith('1 of')")
        assert "".join(texts(".found")) == "needle"
        if has_tokens:
            assert texts("span[data-k]") == [*PIECES[:3], "left", *PIECES[3:6], "sub", "end"]
            page.js("document.querySelector('input[value=version]').click()")
            assert page.js("keys.textContent") == "version 3version 4"
        assert page.errors == [] and page.js("document.title") == "run"


@needs_browser
def test_turns_beyond_the_recorded_tokens_are_shown_as_text(tmp_path):
    row = _episode(True)
    row["tokens"] = _tokens(PIECES[:5], [-0.1] * 5)
    path, _ = view.write(_run(tmp_path / "run", [row]))
    with browser.Browser(tmp_path) as page:
        page.open(path)
        page.until("document.querySelectorAll('.turn').length == 6")
        shown = page.js("[...document.querySelectorAll('.sampled')].map(e => e.textContent)")
        cut = "nee\n[1 more tokens without colours]\ndle"
        assert shown == [f"go {CALL}", "left", "up", cut, "sub", "end"]
        assert page.js("document.querySelectorAll('span[data-k]').length") == 5
        assert page.errors == []


@pytest.mark.slow
@needs_browser
def test_ten_thousand_responses_are_a_hundred_elements_of_a_list(tmp_path):
    rows = [_row(step, step * 10 + k // 8, k % 8) for step in range(125) for k in range(80)]
    path, count = view.write(_run(tmp_path / "run", rows))
    with browser.Browser(tmp_path) as page:
        page.open(path)
        page.js("document.querySelector('#all').click()")
        page.until("count.textContent.startsWith('10000 of 10000')")
        page.js("list.scrollTop = 300000")
        page.until("Number(document.querySelector('.item').dataset.row) > 6000")
        assert count == 10_000 and page.js("document.querySelectorAll('.item').length") < 100
        assert page.js("document.querySelectorAll('*').length") < 1500
