"""One comparison of texts for splits, held-out prompts, near duplicates and decontamination, in any script."""

from __future__ import annotations

import functools
import re
import unicodedata

import regex

# A compatibility form of these is another number or name: 10² is not 102, and 1½ not 11⁄2.
_MEANING = ("<super>", "<sub>", "<fraction>")
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\ufe0e\ufe0f\ufeff]")
# Scripts that put no space between words: each character counts as a word.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
# A hyphen, star, slash or per cent sign is an operator between numbers and brackets, and punctuation elsewhere.
_WORD = regex.compile(
    rf"[{_UNSPACED}]|[[\w\p{{M}}]--[{_UNSPACED}]]+|[\p{{Sm}}\p{{So}}^]|[-*/%](?<=[\d)] ?.)(?= ?[\d(])", regex.V1
)


def normal(text: str) -> str:
    """The text in the form in which texts are compared to the letter.

    Composed (NFC), of normal width (NFKC but for superscripts, subscripts and fractions), without invisible characters,
    each run of white space one space, none at the ends. Case stays.
    """
    if not text.isascii():
        text = _INVISIBLE.sub("", text)
        text = unicodedata.normalize("NFC", "".join(map(_plain, unicodedata.normalize("NFC", text))))
    return " ".join(text.split())


@functools.lru_cache(maxsize=1 << 16)
def _plain(character: str) -> str:
    kept = unicodedata.decomposition(character).startswith(_MEANING)
    return character if kept else unicodedata.normalize("NFKC", character)


def words(text: str) -> list[str]:
    """The words of a normal text without case: runs of letters and digits, single symbols and operators.

    In a script without spaces each character is a word, and so it is in a text of punctuation alone.
    """
    folded = normal(text).casefold()
    return _WORD.findall(folded) or list(folded.replace(" ", ""))
