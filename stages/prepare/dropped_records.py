"""Messages of a preparation about records without rows and outputs without rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.stages.prepare.settings import Config

if TYPE_CHECKING:
    from rlhf.tuning.data.merge import Fates

    Receipt = Mapping[str, Any]


def losses(config: Config, records: Mapping[str, int], fates: Fates, receipts: Iterable[Receipt]) -> str:
    """Describe records without rows by reason, the most common ones, with the first dead letter in full."""
    lost = [(records["duplicates"], "duplicates"), *((n, reason) for reason, n in fates.dropped.most_common(3))]
    parts = [f"{count} {_named(reason, config)}" for count, reason in lost if count]
    if fates.dropped.total() > sum(count for count, _ in lost[1:]):
        parts.append("others for further reasons, in card.html")
    first = next((reason for receipt in receipts for reason in receipt["reasons"]), None)
    if first is not None:
        parts.append(f"{records['dead']} dead ({first})")
    return "; ".join(parts)


def undecided(config: Config, number: int, outputs: str) -> str:
    """Return the error of a source with records that several outputs could use."""
    source, last = config.all_sources()[number].source, outputs.rpartition(", ")[2]
    return (
        f"data.sources.{number} ({source}): its records can be used for {outputs}, and each of several sources states "
        f"its use: add `for: [{last}]`, or `for: [{outputs}]` for all of them"
    )


def rows_by_source(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of the metric `sources`: the rows of each source in each output."""
    outputs = list(dict.fromkeys(output for source in sources for output in source["rows"]))
    rows = [[source["source"], *(str(source["rows"].get(output, 0)) for output in outputs)] for source in sources]
    table = [["rows by source", *outputs], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def _named(reason: str, config: Config) -> str:
    """Return a reason, with the setting that leaves records out in brackets if no other setting can."""
    from rlhf.tuning.data.steps import UNWANTED

    partly = "sft" in config.splits and config.sft_fraction < 1 and "prompts" not in config.splits
    if reason != UNWANTED:
        return reason
    why = f" (sft has data.sft_fraction {config.sft_fraction} of the groups, and no section reads prompts)"
    return f"that no split takes{why if partly else ''}"


def advice(split: str, config: Config, fates: Fates) -> str:
    """Return a sentence on how to get rows for an empty split, by the reason for its emptiness."""
    for part in ("prompt", "completion"):
        if count := fates.dropped_rows[f"{split}:{part}_too_long"]:
            name = f"max_{part}_tokens"
            return (
                f"{count} rows have a {part} of more than data.{name} {getattr(config, name)}; raise it, or set "
                "data.too_long to truncate."
            )
    from rlhf.tuning.data.steps import UNWANTED

    # If records are left, the settings decide which split takes them.
    if not fates.kept and fates.dropped.total() > fates.dropped[UNWANTED]:
        return "every record was dropped, for the reasons below."
    if split == "heldout":
        return (
            f"heldout_fraction is {config.heldout_fraction} of the groups of records that name no split; raise it, "
            "name the `group` of records that begin alike and ask different things, evaluate nothing (evaluate: null), "
            "mark records with split 'heldout', or add heldout to the `for` of a source. Plain texts have no problems "
            "to hold out: SFT keeps a validation share of its own."
        )
    if split == "sft":
        return f"it needs records with a completion, and sft_fraction is {config.sft_fraction}."
    if split == "preference":
        return (
            "it needs records with `completion` (or `chosen`) and `rejected`. Those with `completion` and `label`, "
            "which KTO and apo-zero-unpaired read, are the split `labelled`: data.splits=[labelled, heldout]."
        )
    if split == "labelled":
        return "it needs records with `completion` and `label`."
    return f"prompts is {config.prompts!r} and sft_fraction is {config.sft_fraction}; use 'all-training' or lower it."
