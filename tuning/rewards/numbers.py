"""Numbers as people and models write them, read exactly.

The reader knows signs of Unicode, currencies, groups of thousands in the usual styles, exponents, powers, fractions and
mixed numbers in text and LaTeX, percentages, and words such as million. Forms that have no rational value (a root, a
ratio, a fraction of expressions) are numbers without a value: their parts are not read as numbers of their own.
"""

from __future__ import annotations

import dataclasses
import math
import time
import unicodedata
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from fractions import Fraction

import regex

END = 2000
"""Characters of a long text that are searched first."""
MOST_DIGITS = 20_000
"""Numbers with more digits before or after the point have no value: arithmetic on them would take too long."""

_CHARACTERS = str.maketrans(
    dict.fromkeys("−﹣－‐‑‒–", "-") | dict(zip("，．／∕⁄％﹪٪：＋٫٬＄", ",.///%%%:+.,$", strict=True))
)
_SUPERSCRIPTS = dict(zip("⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹", "-+0123456789", strict=True))
_WORDS_BEFORE = (
    (r"\b(?:Rs\.?|USD|EUR|GBP|CNY|RMB|INR|JPY)(?= ?[-+.\d])", "$"),
    (r"\bnegative +(?=[.\d])", "-"),
    (r"(?<=\b(?:is|of|to)\s|[=:] ?)minus +(?=[.\d])", "-"),
)
# Separators of thousands; a comma in braces and with a negative space are LaTeX's.
_SEPARATORS = (",", r"\{,\}", r",\\!", r"\\,", r"\\[ ]", "['’]", "_", "[\u00a0\u2009\u202f]")
_PLAIN = "|".join(
    [
        # 1.234.567,89 and 1.234,5; 12,34,567 of India; 1 234 567.
        r"\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?(?![.\d])|\d{1,3}(?:\.\d{3})+,\d+(?![\d,.])",
        # Possessive: a list of thousands of numbers would be read again from each of them.
        r"\d{1,2}(?:,\d\d(?=,))++,\d{3}(?![,\d])(?:\.\d+)?",
        *(rf"\d{{1,3}}(?:{one}\d{{3}})+(?!\d)(?:\.\d+)?" for one in _SEPARATORS),
        r"(?<!\d[ ])[1-9]\d{0,2}(?:[ ]\d{3})+(?![\d/])(?:\.\d+)?",
        r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?",
    ]
)
_BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_SIGNED = rf"\s*-?\s*(?:{_PLAIN})\s*"
_POWER = r"\s*(?:\^|\*\*)\s*(?:\{\s*[-+]?\d+\s*\}|[-+]?\d+)"
_NUMBER = regex.compile(
    rf"""
    (?=[-+.\d√\\$€£¥₹₽₩₪₫฿])(?:(?<![\d.])|(?=[√\\]))
    (?:(?P<minus>(?<![\w)\]}}.%])-|(?<=[=({{:$][ ]?)-[ ])|(?<![\w)\]}}.%])\+)?
    (?:\\?[$€£¥₹₽₩₪₫฿][ ]?(?P<inner>-)?)?
    (?:
      (?P<opaque>(?:√|\\sqrt\b)\s*(?:\[[^\]]*\])?\s*(?:{_BRACED}|\d+(?:\.\d+)?))
    | (?:(?P<whole>\d+)(?:\s+(?:and[ ])?|\\[ ,])?)?\\[dtc]?frac\s*
        (?:\{{(?P<above>{_SIGNED})\}}|(?P<above>\d))\s*(?:\{{(?P<below>{_SIGNED})\}}|(?P<below>\d))
    | (?P<opaque>\\[dtc]?frac\s*(?:{_BRACED}|\d)\s*(?:{_BRACED}|\d))
    | (?:(?P<whole>\d+)(?:[ ]+|[ ]and[ ]))?(?P<above>{_PLAIN})[ ]?/[ ]?(?P<below>{_PLAIN})(?![ ]?/)
    | (?P<mantissa>{_PLAIN})\s*(?:[×x*·⋅]|\\times|\\cdot)\s*10(?P<exponent>{_POWER})
    | (?P<mantissa>{_PLAIN})(?P<power>{_POWER})
    | (?P<opaque>(?:{_PLAIN})(?:\^(?!\{{?\s*\\circ)(?:{_BRACED}|\w)|\s*(?:π|\\pi\b)|:\d+(?::\d+)*))
    | (?P<comma>(?<![(\[,][ ]?)\d+,\d+(?![\d,.]|[ ]?[)\]]))(?<!(?<!\d)\d{{1,3}},\d{{3}})
    | (?P<mantissa>{_PLAIN})
    )
    (?:\s*(?:\\?%|(?P<percent>percent|pct)\b)|[ ](?P<word>thousand|million|billion|trillion)\b)?
    """,
    regex.VERBOSE | regex.IGNORECASE,
)
_WORDS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Digits of a word (H2O, x_1, m^2), which are read only where a text has no others, and denominators of expressions.
_ATTACHED = regex.compile(r"(?:(?<![\\A-Za-z])[A-Za-z]+|[_^]\{?)$")
_DENOMINATOR = regex.compile(r"[\w)\]}][ ]?/[ ]?$")
_UNIT = regex.compile(
    r"[\s$)}*.]*(?:(?:\\(?:text|mathrm)\{)?\s*[^\W\d_]+\.?(?:/[^\W\d_]+)?(?:\^\{?\d\}?|[²³])?)?(?:\^\{?\\circ\}?)?[°\s$)}*.]*"
)
_OPENING = regex.compile(r"(?:\\boxed\{|[\s$({*])*")


@dataclasses.dataclass(frozen=True)
class Written:
    """A number of a text: its readings, the most likely first, none if it has no value, and the scale of its unit."""

    readings: tuple[Fraction, ...]
    scale: Fraction = Fraction(1)
    """1/100 for a percentage, 1,000,000 for millions."""

    def equals(self, other: Written, tolerance: float = 0.0) -> bool:
        """Whether both are one number, by value, or by face where the other has no unit: 50 % is 0.5, and also 50.

        tolerance: the allowed difference, relative to `other`.
        """
        scales = {(self.scale, other.scale)}
        if 1 in (self.scale, other.scale):
            scales.add((Fraction(1), Fraction(1)))
        return any(
            abs(mine * a - theirs * b) <= Fraction(tolerance) * abs(theirs * b)
            for a, b in scales
            for mine in self.readings
            for theirs in other.readings
        )

    @property
    def name(self) -> str | None:
        """One text for all forms of the number: 7, 7.0 and 14/2 have the same; None without a value."""
        if not self.readings:
            return None
        value = self.readings[0] * max(self.scale, Fraction(1))
        try:
            text = repr(float(value))
            exact = Fraction(text) == value
        except OverflowError:
            exact = False
        # Decimal has no limit of digits.
        parts = [str(Decimal(value.numerator)), str(Decimal(value.denominator))]
        return text if exact else "/".join(parts if parts[1] != "1" else parts[:1])


def last(text: str, seconds: float | None = None) -> Written | None:
    """The last number of a text; None without one. Digits that belong to a word count only if there are no others.

    Raises TimeoutError where the search takes longer than `seconds`.
    """
    found, deadline = None, time.monotonic() + (math.inf if seconds is None else seconds)
    # Mostly the end of a long text is enough.
    for part in (text[-END:].partition(" ")[2], text) if len(text) > END else (text,):
        for match in _NUMBER.finditer(_plain(part), timeout=seconds):
            if time.monotonic() > deadline:
                raise TimeoutError
            before = match.string[max(0, match.start() - 24) : match.start()]
            attached = bool(_ATTACHED.search(before)) and not match["minus"]
            if found is None or found[0] or not attached:
                found = attached, match
        if found is not None and not found[0]:
            break
    return None if found is None else _written(found[1])


def only(text: str) -> Written | None:
    """The number that a text is, with a currency, a unit of one word or LaTeX around it.

    None for any other text, and for a number without a value.
    """
    text = _plain(text)
    matches = list(_NUMBER.finditer(text))
    if not matches or not _OPENING.fullmatch(text[: matches[0].start()]):
        return None
    # A unit may have an exponent.
    found = _written(matches[0]) if _UNIT.fullmatch(text[matches[0].end() :]) else None
    if found and matches[0]["comma"]:
        # One number with a decimal comma: of a list of two the last alone is not the answer.
        found = dataclasses.replace(found, readings=found.readings[1:])
    return found if found and found.readings else None


def _plain(text: str) -> str:
    text = regex.sub(r"(\d?)([¼-¾⅐-⅞])", lambda m: f"{m[1]} {unicodedata.normalize('NFKC', m[2])}", text)
    text = regex.sub(r"(?<=[\d)])[⁻⁺⁰¹²³⁴-⁹]+", lambda m: "^{" + "".join(_SUPERSCRIPTS[c] for c in m[0]) + "}", text)
    text = text.translate(_CHARACTERS)
    for words, sign in _WORDS_BEFORE:
        text = regex.sub(words, sign, text, flags=regex.IGNORECASE)
    return text


def _written(match: regex.Match[str]) -> Written:
    sign = -1 if match["minus"] or match["inner"] else 1
    readings = [sign * value for value in _values(match) if value is not None]
    scale = Fraction(_WORDS.get((match["word"] or "").lower(), 1))
    return Written(tuple(readings), Fraction(1, 100) if match["percent"] or match[0].endswith("%") else scale)


def _values(match: regex.Match[str]) -> Iterator[Fraction | None]:
    """The readings of a number without its sign; None for one that is too large."""
    if _DENOMINATOR.search(match.string[max(0, match.start() - 3) : match.start()]) or match["opaque"]:
        return
    if match["comma"]:
        # Of a list the last; or a decimal comma.
        yield _value(match["comma"].partition(",")[2])
        yield _value(match["comma"].replace(",", "."))
    elif match["below"]:
        above, below = _value(match["above"]), _value(match["below"])
        if above is not None and below:
            # 3 1/2 is mixed; 10 4/2 are two numbers.
            whole = _value(match["whole"] or "0") if 0 <= above < below else Fraction(0)
            yield None if whole is None else above / below + whole
    else:
        value = _value(match["mantissa"])
        exponent = match["exponent"] or match["power"]
        if exponent is None or value is None:
            yield value
        elif match["exponent"]:
            yield _raised(Fraction(10), exponent, value)
        else:
            yield _raised(value, exponent, Fraction(1))


def _raised(base: Fraction, exponent: str, factor: Fraction) -> Fraction | None:
    power = int(regex.sub(r"[^-\d]", "", exponent)[:9])
    digits = max(len(bin(base.numerator)), len(bin(base.denominator))) * 0.31 * abs(power)
    return None if digits > MOST_DIGITS or (not base and power < 0) else factor * base**power


def _value(text: str) -> Fraction | None:
    text = regex.sub(r"[^-+.,\deE]", "", text)
    european = regex.search(r"\.\d+[.,]", text)
    try:
        number = Decimal(text.replace(".", "").replace(",", ".") if european else text.replace(",", ""))
    except InvalidOperation:
        # An exponent of more than 18 digits.
        return None
    return None if abs(number.adjusted()) > MOST_DIGITS else Fraction(number)
