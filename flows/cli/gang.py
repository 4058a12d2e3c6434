"""Commands of a gang: one run's stages on several processes (docs/gangs.md)."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from flows.cli.shared import err, group, interrupt_at_sigterm, usage_error

commands = group()


@commands.command()
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the lead listens: that of its RLHF_GANG.")],
    rank: Annotated[int, typer.Option(min=1, help="Number of this rank; the lead is 0.")],
) -> None:
    """Compute as one rank of the gang that a run on another host leads, until that run ends."""
    from stages.worker.places import WAIT, Place, PlaceError, address_of, seconds, token_of

    try:
        address_of(address)
        token_of()
        seconds(os.environ, WAIT, Place.wait)
    except PlaceError as e:
        raise usage_error(str(e)) from e
    raise typer.Exit(stay_as(address, rank))


def join_instead() -> None:
    """Where the environment says that this process is a rank behind the lead: joins, and exits with its status."""
    from stages.worker.places import PlaceError, place_of

    try:
        place = place_of()
    except PlaceError as e:
        raise usage_error(str(e)) from e
    if place is not None and place.rank > 0:
        raise typer.Exit(stay_as(f"{place.host}:{place.port}", place.rank))


def stay_as(address: str, rank: int) -> int:
    """Stays in the gang; the exit status: 130 after Ctrl-C and SIGTERM."""
    from stages.worker.joining import stay

    interrupt_at_sigterm()
    err.print(f"rank {rank} of the gang at {address}", soft_wrap=True)
    try:
        return stay(address, rank, lambda text: err.print(text, soft_wrap=True))
    except KeyboardInterrupt:
        return 130
