"""What a model has written is text in Prefect's UI, whatever it looks like in Markdown."""

import uuid

import pytest
from markdown_it import MarkdownIt
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlhf.flows.orchestration.prefect_artifacts import _sample_line, wait_until_recorded
from tests.support import free_port

TEXTS = [
    "![x](http://evil/beacon.png)",
    "[click](http://evil)",
    "<img src=http://evil onerror=alert(1)>",
    "<script>alert(1)</script>",
    "http://evil.example/x",
    "www.evil.example",
    "<http://evil>",
    "a | b",
    "`code` **bold** _it_ ~~gone~~",
    "# head\n\n| a |\n|---|\n",
    "&lt;img&gt; &#x3c;",
    "\\![x](http://evil)",
    "[x]: http://evil\n\n[x]",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_completion_is_shown_as_it_was_written(text):
    line = _sample_line({"prompt": text, "text": text, "stop": "eos"})
    table = f"| prompt | completion | stop |\n|---|---|---|\n{line}"
    page = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(table)
    for tag in ("<img", "<a", "<script", "<strong", "<code", "<em", "<s>", "<h1"):
        assert tag not in page
    assert page.count("<td>") == 3 and page.count("<tr>") == 2


def test_a_server_that_is_gone_at_the_end_of_a_run_raises_nothing_in_place_of_its_error(caplog):
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        wait_until_recorded(uuid.uuid4())
    assert "Prefect may not have the end of this run (ConnectError: " in caplog.text
