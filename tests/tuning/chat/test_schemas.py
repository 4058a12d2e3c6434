"""Schemas of tools: what they accept, and that a small one cannot take long."""

import json
import time

import pytest

from rlhf.tuning.chat.schemas import MOST_BYTES, MOST_NODES, TooManySteps, check, first_mismatch

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
