"""Texts that a reader takes for the same compare equal, in any script; others do not."""

import pytest

from rlhf.tuning.texts import normal, words


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("What is 2 plus 2? \n", "What is 2 plus 2?"),
        ("\ufeff\tWhat  is\r\n2\u00a0plus\u30002?", "What is 2 plus 2?"),
        ("cafe\u0301", "caf\u00e9"),
        ("１＋２＝？", "1+2=?"),
        ("ｶﾞｷﾞ", "ガギ"),
        ("ﬁx\u200bed soft\u00adly", "fixed softly"),
        ("한국".encode().decode(), "\u1112\u1161\u11ab\u1100\u116e\u11a8"),
    ],
    ids=["ends", "spaces", "NFD", "full width", "half width", "ligatures and invisible characters", "Hangul"],
)
def test_forms_of_one_text_are_equal(text, same):
    assert normal(text) == normal(same) == same or normal(same) == normal(text) == text


@pytest.mark.parametrize(
    ("one", "other"), [("10² = ?", "102 = ?"), ("H₂O", "H2O"), ("1½", "11⁄2"), ("Polish", "polish"), ("3 - 5", "3 + 5")]
)
def test_texts_that_mean_something_else_are_not(one, other):
    assert normal(one) != normal(other)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Don't STOP, snake_case: naïve Straße!", ["don", "t", "stop", "snake_case", "naïve", "strasse"]),
        ("小明有5個。", ["小", "明", "有", "5", "個"]),
        ("ひらカタ漢", ["ひ", "ら", "カ", "タ", "漢"]),
        ("ภาษา", ["ภ", "า", "ษ", "า"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("2+2=4 → 😀", ["2", "+", "2", "=", "4", "→", "😀"]),
        ("12 - 5, (3) / 4 well-known and/or", ["12", "-", "5", "3", "/", "4", "well", "known", "and", "or"]),
        ("?! ?", ["?", "!", "?"]),
        ("", []),
    ],
    ids=["words", "Han", "kana", "Thai", "Korean", "Hindi", "symbols", "operators", "punctuation alone", "empty"],
)
def test_words_of_any_script(text, parts):
    assert words(text) == parts
