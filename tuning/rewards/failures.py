"""Failures of rewards: whose fault one is, and how many of them a stage bears (R25).

sample    the function raised, took too long, ran out of memory or gave no finite number on this completion: content
outage    a service, a package, a process or the machine failed: never content; the same command tries again
refusal   a service answered with an error status: the sample's if the service gives verdicts on others, else an outage
          (`rlhf.tuning.rewards.processes`)
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import math
import urllib.error
from collections import Counter
from collections.abc import Mapping, Sequence

from rlhf.tuning.errors import with_causes
from rlhf.tuning.rewards.samples import Kind, Outcome

OUTAGES = 8
"""Calls in a row without a verdict after which the others are not made."""
MOST = 5
"""Reasons that are listed: the commonest."""
REASON_CHARACTERS = 300
"""Length to which a reason is cut."""

# HTTP statuses that are an answer to what was sent, and those of a service that is busy, or knows no key. Others may be
# either: a firewall blocks a text with 403, a text crashes a server with 500, and so answers one that is not set up.
_OF_THE_REQUEST = (400, 413, 422)
_OF_THE_SERVICE = (401, 402, 407, 408, 425, 429, 502, 503, 504)
_OF_THE_MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
    errno.ETIMEDOUT, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH,
)  # fmt: skip
# Packages that a user's function may call, by name: none of them has to be installed.
_OF_PACKAGES = {
    "requests": ("ConnectionError", "Timeout"),
    "httpx": ("TransportError",),
    "urllib3": ("HTTPError",),
    "aiohttp": ("ClientConnectionError", "ServerTimeoutError"),
    "openai": ("APIConnectionError",),
    "anthropic": ("APIConnectionError",),
    "grpc": ("RpcError",),
}


class Outage(RuntimeError):
    """The source of a reward cannot be used at present. A reward function may raise it: it is no verdict on a
    sample."""


class Refusal(Outage):
    """A service answered a request with an error status, which may be the fault of the request or of the service."""


class TooManyFailures(RuntimeError):
    """More samples failed than the settings allow."""


@dataclasses.dataclass(frozen=True)
class Tally:
    """How the outcomes of one reward are divided."""

    failed: int
    unscored: int
    """The reward does not apply: neither right nor wrong. Means and pass rates are over the others."""
    reasons: dict[str, int]
    """The commonest failures with their counts, the most frequent first."""


@dataclasses.dataclass
class Streak:
    """Calls in a row that had no verdict."""

    length: int = 0
    last: str = ""
    """The reason of the last one."""

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Counts a call with these outcomes."""
        failed = [outcome for outcome in outcomes if outcome.is_outage]
        self.length = self.length + 1 if failed else 0
        self.last = failed[0].failure or "" if failed else ""

    @property
    def untried(self) -> Outcome | None:
        """The outcome of a call that is not made, as there are too many; None where it is to be made."""
        if self.length < OUTAGES:
            return None
        reason = f"not tried after {OUTAGES} calls in a row without a verdict, the last: {self.last}"
        return Outcome(None, reason, "outage")


def kind_of(error: BaseException) -> Kind:
    """Return whose fault an exception of a reward function is: the worst of it and its causes."""
    kinds = {_kind(each) for each in with_causes(error)}
    return "outage" if "outage" in kinds else "refusal" if "refusal" in kinds else "sample"


def _kind(error: BaseException) -> Kind:
    if isinstance(error, Refusal):
        return "refusal"
    if isinstance(error, Outage | ConnectionError | concurrent.futures.BrokenExecutor):
        return "outage"
    status = _http_status(error)
    if status is not None:
        return "sample" if status in _OF_THE_REQUEST else "outage" if status in _OF_THE_SERVICE else "refusal"
    if isinstance(error, urllib.error.URLError) or (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE):
        return "outage"
    named = (c.__name__ in _OF_PACKAGES.get(c.__module__.split(".")[0], ()) for c in type(error).__mro__)
    return "outage" if any(named) else "sample"


def _http_status(error: BaseException) -> int | None:
    """The status that a server answered with, as urllib, requests, httpx and clients of APIs keep it."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code
    status = getattr(error, "status_code", getattr(getattr(error, "response", None), "status_code", None))
    return status if isinstance(status, int) else None


def tallied(outcomes: Sequence[Outcome]) -> Tally:
    """Counts of the outcomes of one reward."""
    failures = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
    unscored = sum(not outcome.applies for outcome in outcomes)
    return Tally(sum(failures.values()), unscored, dict(failures.most_common(MOST)))


def check_failures(
    outcomes: Mapping[str, Sequence[Outcome]],
    max_failed_fraction: float,
    *,
    setting: str = "max_failed_fraction",
    what: str = "reward",
    functions: Mapping[str, str] | None = None,
    kept: str = "finished scores are kept",
) -> None:
    """Ends a stage whose rewards failed: on any outage, and where a reward failed on too many samples.

    Args:
        outcomes: of each reward by name, one for each sample.
        max_failed_fraction: share of the samples, rounded up to whole ones, that each reward may fail on.
        setting: how that limit is called in a recipe. what: the source of the outcomes, as it is called.
        functions: the function of each reward, where its name says little.
        kept: the work that an outage leaves for the next try of the caller's stage.
    Raises:
        Outage: there is an outage among the outcomes, however few.
        TooManyFailures: a failure on this many samples is not their fault.
    """
    named = {name: f" ({function})" for name, function in (functions or {}).items() if function != name}
    for name, column in outcomes.items():
        lost = [outcome for outcome in column if outcome.is_outage]
        if lost:
            raise Outage(
                f"{what} {name}{named.get(name, '')}: no verdict on {len(lost)} of {len(column)} completions: "
                f"{lost[0].failure}. This is an outage and no fault of theirs: {kept}, and the same command goes on "
                "when the cause is gone"
            )
    for name, column in outcomes.items():
        found = tallied(column)
        if found.failed > math.ceil(max_failed_fraction * len(column)):
            reason, count = next(iter(found.reasons.items()))
            example = next(number for number, outcome in enumerate(column) if outcome.failure == reason)
            # What fails on all of them is no fault of completions.
            or_else = "" if found.failed == len(column) else f", or raise {setting} if these completions are at fault"
            raise TooManyFailures(
                f"{what} {name}{named.get(name, '')} failed on {found.failed} of {len(column)} completions, more than "
                f"{setting} {max_failed_fraction:g} allows, most often ({count} times, first on completion {example}) "
                f"with: {reason}. Mend the {what} and give the same command again{or_else}; no failure is kept"
            )
