"""The causes of an error."""

from __future__ import annotations

from collections.abc import Iterator


def with_causes(error: BaseException, suppressed: bool = False) -> Iterator[BaseException]:
    """Yield an error, the errors that it was raised from or under, and so on, each once.

    suppressed: also what `from None` leaves out of a traceback.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        yield found
        seen.add(id(found))
        hidden = found.__suppress_context__ and not suppressed
        found = found.__cause__ or (None if hidden else found.__context__)
