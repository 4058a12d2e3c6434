"""Tool calls: every family's form is read with its JSON types, and a malformed call is an error text."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhf.tuning.chat.calls import Call, instructions, parse, render, resolve
from rlhf.tuning.chat.schemas import MOST_BYTES, MOST_NODES, TooManySteps, check, first_mismatch
from tests.tuning.chat.templates import TEXT, TOOLS, tool

FORMATS = ("hermes", "llama", "gemma")

H = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2, "exact": true}}\n</tool_call>'
L = '{"name": "add", "parameters": {"a": 1, "b": 2, "exact": true}}'
F = "<start_function_call>call:add{a:1,b:2,exact:true}<end_function_call>"
P = "```tool_code\nadd(a=1, b=2, exact=True)\n```"


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ("hermes", H, ""),
        ("hermes", f"I add.\n{H}\n", "I add."),
        ("hermes", H.replace("\n", ""), ""),
        ("hermes", f"<think>add or say? <tool_call>x</tool_call></think>{H}",
         "<think>add or say? <tool_call>x</tool_call></think>"),
        ("llama", L, ""),
        ("llama", f"<|python_tag|>{L}", ""),
        ("llama", f"So:<|python_tag|>{L}", "So:"),
        ("llama", L.replace("parameters", "arguments").replace("{", '{"type": "function", ', 1), ""),
        ("gemma", F, ""),
        ("gemma", F.replace("<start_function_call>", "").replace("<end_function_call>", ""), ""),
        ("gemma", F + "<start_function_response>", ""),
        ("gemma", f"I add.\n{P}\n", "I add."),
        ("gemma", "```tool_code\nprint(add(1, 2, exact=True))\n```", ""),
    ],
)  # fmt: skip
def test_a_call_is_read_in_every_form(form, text, content):
    parsed = parse(text, form, TOOLS)
    assert (parsed.errors, parsed.content) == ([], content)
    [call] = parsed.calls
    assert call.name == "add"
    # 1 == True in Python; JSON tells them apart.
    assert json.dumps(call.arguments) == '{"a": 1, "b": 2, "exact": true}'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f'{H} and <tool_call>{{"name": "now"}}</tool_call>'),
        ("llama", L + '; {"name": "now", "parameters": {}}'),
        ("llama", L + '\n{"name": "now", "parameters": {}}'),
        ("gemma", F + "<start_function_call>call:now{}<end_function_call>"),
        ("gemma", "```tool_code\nadd(a=1, b=2)\nnow()\n```"),
        ("gemma", P + "\n```tool_code\nnow()\n```"),
    ],
)
def test_parallel_calls_keep_their_order(form, text):
    parsed = parse(text, form, TOOLS)
    assert (parsed.errors, [call.name for call in parsed.calls]) == ([], ["add", "now"])


FAULTS = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}</tool_call>', ["not valid JSON", "expected"]),
    ("hermes", H.removesuffix("</tool_call>"), ["no closing </tool_call>"]),
    ("hermes", '<tool_call>{"name": "add"', ["no closing </tool_call>"]),
    ("hermes", H.replace("\n</", "} </"), ["text after its JSON object"]),
    ("hermes", '<tool_call>["add"]</tool_call>', ["a list", "expected"]),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ["no name"]),
    ("hermes", H.replace("arguments", "parameters"), ["keys 'name, parameters'", '"arguments"']),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', ["'now' has text as arguments"]),
    ("hermes", H.replace('"add"', '"subtract"'), ["no tool 'subtract'", "add, say, now"]),
    ("hermes", H.replace('"b": 2, ', ""), ["missing argument b", "a (number)", "exact (boolean), optional"]),
    ("hermes", H.replace('"exact"', '"exakt"'), ["unknown argument 'exakt'"]),
    ("hermes", H.replace("2", '"2"'), ["argument b", "'2' is not of type 'integer'"]),
    ("hermes", H.replace("1", "true"), ["argument a", "True is not of type 'number'"]),
    ("hermes", H.replace("2", "2.5"), ["argument b"]),
    ("hermes", H.replace("1", "NaN"), ["NaN is no JSON number"]),
    ("hermes", H.replace("1", "1e999"), ["too large a number"]),
    ("hermes", H.replace('"exact"', '"a"'), ["'a' is there twice"]),
    ("hermes", "<tool_call>" + "[" * 100_000, ["no closing </tool_call>"]),
    ("hermes", H.replace("1", "[" * 100_000), ["nested too deeply"]),
    ("hermes", H.replace("1", "[" * 900 + "]" * 900), ["nested too deeply", "32 levels"]),
    ("hermes", H.replace("1", '{"a": ' * 300 + "1" + "}" * 300), ["nested too deeply"]),
    ("gemma", P.replace("1", "[" * 100 + "]" * 100), ["nested too deeply"]),
    ("hermes", H.replace("1", "1" * 5_000), ["not valid JSON"]),
    ("hermes", r'<tool_call>{"name": "say", "arguments": {"text": "\ud800"}}</tool_call>', ["no JSON value"]),
    ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "a", "how": "x"}}</tool_call>', ["how", "'loud'"]),
    ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "a", "to": ["b", 1]}}</tool_call>', ["to[1]"]),
    ("llama", L[:-1], ["not valid JSON", '"parameters"']),
    ("llama", '<|python_tag|>search.call(query="a")', ["not valid JSON"]),
    ("gemma", F.removesuffix("<end_function_call>"), ["no closing <end_function_call>"]),
    ("gemma", F.replace("}", ""), ["cannot be read"]),
    ("gemma", F.replace("a:1,", "a:1,a:1,"), ["'a' is there twice"]),
    ("gemma", "<start_function_call>add(1)<end_function_call>", ["expected call:name{"]),
    ("gemma", F.replace("1", "[" * 100_000), ["nested too deeply"]),
    ("gemma", P.replace("1", "1 +"), ["not valid Python"]),
    ("gemma", P.replace("1", "(" * 10_000), ["not valid Python"]),
    ("gemma", P.replace("1", "-" * 100_000 + "1"), ["not valid Python"]),
    ("gemma", P.replace("1", "len('a')"), ["'add' has an argument that is no literal"]),
    ("gemma", P.replace("a=1", "**{1: 2}"), ["no literal"]),
    ("gemma", P.replace("1", "{1, 2}"), ["no JSON value"]),
    ("gemma", "```tool_code\nimport os\n```", ["no function call"]),
    ("gemma", "```tool_code\nadd(1, 2, True, 4)\n```", ["4 arguments without a name", "3 parameters"]),
    ("gemma", "```tool_code\nadd(1, a=2)\n```", ["argument a twice"]),
    ("gemma", "```tool_code\n```", ["is empty"]),
    ("gemma", P.removesuffix("```"), ["no closing ```"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "said"), FAULTS)
def test_a_malformed_call_is_an_error_that_the_policy_reads(form, text, said):
    parsed = parse(text, form, TOOLS)
    assert parsed.calls == [] and len(parsed.errors) == 1
    for part in said:
        assert part in parsed.errors[0]
    assert len(parsed.errors[0]) < 500


def test_other_calls_of_the_turn_are_read_beside_a_malformed_one():
    parsed = parse(f"{H}<tool_call>[</tool_call>b<tool_call>{{}}{H}", "hermes", TOOLS)
    assert [call.name for call in parsed.calls] == ["add", "add"]
    assert ["Tool call 2" in parsed.errors[0], "Tool call 3" in parsed.errors[1]] == [True, True]
    assert parsed.content == "b"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<think>perhaps " + H),
        ("hermes", "perhaps " + H + "</think>"),
        ("hermes", H + " or not?</think>no"),
        ("gemma", P + "</think>no"),
        ("llama", '{"answer": 4}'),
        ("llama", "The call is " + L),
        ("gemma", "recall:add{a:1}"),
    ],
)
def test_thoughts_and_answers_hold_no_call(form, text):
    parsed = parse(text, form, TOOLS)
    assert (parsed.calls, parsed.errors, parsed.content) == ([], [], text.strip())


def test_text_without_quotes_is_text_where_the_tool_asks_for_text():
    # The control token <escape> is gone from decoded text.
    parsed = parse("call:say{text:12,to:[x,y]}", "gemma", TOOLS)
    assert parsed.calls == [Call("say", {"text": "12", "to": ["x", "y"]})]
    parsed = parse("call:add{a:12,b:x}", "gemma", TOOLS)
    assert "argument b" in parsed.errors[0]


# Without lone surrogates, which no file can hold.
STRINGS = st.text(st.characters(codec="utf-8"), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, JSON, max_size=3)), min_size=1, max_size=3))
@example([("class", {"from": "```\n</tool_call><escape>", "a-b": {"<tool_call>": [True, 1, 1.0, None]}})])
@example([("get-it", {"a": '"<end_function_call>', "b": "x<escape>y", "c": {"d:e": []}})])
@example([("add", {"a": 1}), ("say", {"text": "<think> ends with </think>", "to": {"b": 2}})])
def test_what_is_rendered_is_read_back_with_its_types(written):
    calls = [Call(name, arguments) for name, arguments in written]
    tools = [
        tool(name, {key: {} for call in calls for key in call.arguments}) for name in sorted({c.name for c in calls})
    ]
    for form in FORMATS:
        parsed = parse(render(calls, form), form, tools)
        assert parsed.errors == [] and parsed.content == "", form
        read = json.dumps([vars(call) for call in parsed.calls], sort_keys=True)
        assert read == json.dumps([vars(call) for call in calls], sort_keys=True), form


PIECES = st.sampled_from([*"{}[]\"':,.;()=a1 \n\\", "<tool_call>", "</tool_call>", "<|python_tag|>", "```tool_code\n",
                          "```", "<start_function_call>", "<end_function_call>", "<escape>", "call:add{", '{"name": ',
                          '"add"', '"arguments": {', "add(", "**", "<think>", "</think>", "\x00"])  # fmt: skip


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(st.lists(PIECES, max_size=14).map("".join))
def test_no_text_raises(text):
    for form in FORMATS:
        parsed = parse(text, form, TOOLS)
        assert all(isinstance(error, str) for error in parsed.errors)


@pytest.mark.parametrize("form", FORMATS)
def test_instructions_hold_every_schema_and_an_example_that_is_read(form):
    text = instructions(TOOLS, form)
    described = text.partition("<tools>\n")[2].partition("\n</tools>")
    assert [json.loads(line) for line in described[0].splitlines()] == TOOLS
    parsed = parse(described[2].partition(":\n")[2].rpartition("\n")[0], form, [tool("NAME", {"ARGUMENT": TEXT})])
    assert (parsed.calls, parsed.errors) == ([Call("NAME", {"ARGUMENT": "VALUE"})], [])


def test_auto_is_the_form_of_the_template():
    assert resolve("auto", "{% if tools %}<tool_call>{% endif %}<|im_start|>") == "hermes"
    assert resolve("auto", "<|start_header_id|>") == "llama"
    assert resolve("auto", "<start_of_turn>") == "gemma"
    assert resolve("auto", "<|start_header_id|> <tool_call>") == "hermes"
    assert resolve("auto", "<|im_start|>") == resolve("auto", None) == "hermes"
    assert resolve("llama", "<tool_call>") == "llama"
    with pytest.raises(ValueError, match="expected one of auto, hermes, llama, gemma"):
        resolve("xml", "")


def test_a_wrong_format_or_schema_names_itself():
    for refused in (lambda: parse("", "auto", TOOLS), lambda: render([], "auto"), lambda: instructions([], "auto")):
        with pytest.raises(ValueError, match="tool format is 'auto'"):
            refused()
    with pytest.raises(ValueError, match="tool schema is .*expected"):
        parse("", "hermes", [{"name": "add"}])
    with pytest.raises(ValueError, match="tool add: its parameters are not a JSON schema"):
        parse(H, "hermes", [tool("add", {"a": {"type": "nummer"}, "b": {}, "exact": {}})])
    # No reference of a schema is fetched.
    with pytest.raises(ValueError, match="tool add: its parameters are not a JSON schema"):
        parse(H, "hermes", [tool("add", {"a": {"$ref": "http://localhost/a.json"}, "b": {}, "exact": {}})])


DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"pattern": r"^\d+$"}}}, {"a": "12"}, {"a": "1x"}),
        ({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "a" * 9999}, {"a": "a" * 9999 + "!"}),
        # Python has no names of classes of letters, and no pattern that turns an option off.
        ({"properties": {"a": {"pattern": r"^\p{Lu}(?i)b$"}}}, {"a": "ÄB"}, {"a": "äB"}),
        ({"patternProperties": {r"^\pL$": {"type": "null"}}}, {"a": None}, {"a": 1}),
        ({"patternProperties": {"^x": {"type": "number"}}, "additionalProperties": False}, {"x1": 1}, {"y": 1}),
        ({"patternProperties": {"^x": {"type": "number"}}}, {"y": "z"}, {"x": "z"}),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, {"a": 1, "b": ""}, {"b": 1}),
        ({"$schema": DRAFT_7, "definitions": {"n": {"type": "null"}}, "properties": {"a": {"$ref": "#/definitions/n"}}},
         {"a": None}, {"a": "1"}),
        ({"properties": {"a": {"uniqueItems": True}}}, {"a": [1, "1"]}, {"a": [1, 1]}),
    ],
)  # fmt: skip
def test_arguments_are_compared_as_the_schema_says(schema, good, bad):
    check(schema)
    assert first_mismatch(good, schema) is None
    assert first_mismatch(bad, schema) is not None


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"pattern": "(?=a)"}, r"RE2 cannot run the pattern '\(\?=a\)' \(invalid perl operator"),
        ({"patternProperties": {r"(a)\1": {}}}, "RE2 cannot run the pattern"),
        ({"type": "nummer"}, "not a JSON schema .*'nummer'"),
        ({"description": "x" * MOST_BYTES}, f"bytes; at most {MOST_BYTES} are supported"),
        ({"enum": list(range(MOST_NODES))}, f"at most {MOST_NODES} are supported"),
        ({"properties": {"a": {"$schema": DRAFT_7}}}, r"\$schema is supported at the root alone"),
        (json.loads('{"not": ' * 40 + "{}" + "}" * 40), "deeper than 32 levels"),
    ],
)
def test_a_schema_that_is_not_supported_is_refused_with_the_reason(schema, said):
    with pytest.raises(ValueError, match=said):
        check(schema)


DOUBLED = {"$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": False}}
TWICE = {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/n"}}}] * 2}
DEEP = json.loads('{"a": ' * 60 + "{}" + "}" * 60)


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ({}, DOUBLED | {"$ref": "#/$defs/a0"}),
        (
            {"a": "a" * 300_000},
            {"properties": {"a": {"anyOf": [{"pattern": f"(a|{i}){{1,200}}y"} for i in range(100)]}}},
        ),
        (DEEP, {"$defs": {"n": {**TWICE, "minProperties": 1}}, "$ref": "#/$defs/n"}),
        ({"a": [1, "a"] * 2000}, {"properties": {"a": {"uniqueItems": True}}}),
        ({f"a{i}": 1 for i in range(99)}, {"patternProperties": {f"^b{i}": {} for i in range(99)}}),
        ({"a": ["x"] * 9999}, {"properties": {"a": {"items": {"pattern": ".{1,900}y"}}}}),
        # Each error holds the text.
        ({"a": "x" * 3_000_000}, {"properties": {"a": {"anyOf": [{"type": "null"}] * 100}}}),
    ],
)
def test_a_comparison_that_grows_too_fast_is_given_up(value, schema):
    check(schema)
    began = time.process_time()
    with pytest.raises(TooManySteps):
        first_mismatch(value, schema)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("keyword", ["unevaluatedProperties", "unevaluatedItems"])
def test_keywords_that_jsonschema_follows_uncounted_are_refused(keyword):
    with pytest.raises(ValueError, match=f"{keyword} is not supported: use additionalProperties or items"):
        check({"type": "object", "properties": {"a": {"patternProperties": {"^(a+)+$": {}}, keyword: False}}})
