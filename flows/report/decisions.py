"""The decision of a run's gate, as lines and as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WORDS = {True: "holds", False: "missed"}


def decision_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the decision and a line for each check; none without a decision."""
    decision = record.get("decision")
    if not decision:
        return []
    checks = [f"  {WORDS[check['holds']]:<6}  {check['said']}" for check in decision["checks"]]
    return [f"gate    {outcome(decision)}", *(checks if decision["decision"] != "nothing new" else [])]


def outcome(decision: Mapping[str, Any]) -> str:
    """Describe the decision and its effect on the name."""
    made, name = decision["decision"], decision.get("name", "")
    if made == "promoted":
        entry = decision.get("entry")
        return f"promoted: {name} entry {entry}" if entry is not None else f"promoted, but {name} was not moved"
    return f"{made}: {'; '.join(decision['reasons'])}" if made == "nothing new" else f"{made}: {name} stays as it is"


def decision_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each check: name, figure, bound, result, and a sentence."""
    checks = (record.get("decision") or {}).get("checks", [])
    return [
        {
            "check": check["name"],
            **{key: check[key] for key in ("figure", "bound", "said")},
            "holds": WORDS[check["holds"]],
        }
        for check in checks
    ]
