"""The tensors of one push, put together from its buckets (`frames`) in the order in which they were cut."""

from __future__ import annotations

from .frames import HEAD, Fingerprint, Kind, Piece, opened


class PushRefused(ValueError):
    """A push that is not what was begun: cut, out of order, changed on its way, or of another model."""


class Arriving:
    """One push. It holds the tensor that has not all come, and none of those that have."""

    def __init__(self, number: str, policy: str):
        """number: of the push; policy: its name."""
        self.number, self.policy = number, policy
        self.given: dict[str, tuple[Kind, str]] = {}
        """Kind and SHA-256 of each tensor that has come."""
        self._seen = Fingerprint()
        self._before = b""
        """The head of the bucket before."""
        self._part: tuple[Piece, bytearray] | None = None
        """The last piece of a tensor that has not all come, and its bytes so far."""

    def add(self, bucket: bytes) -> list[tuple[str, Kind, bytearray]]:
        """The tensors that a bucket completes; none where it is the one before, whose answer was lost on its way.

        Raises BrokenBucket, which changes nothing, and PushRefused where another should come.
        """
        whole: list[tuple[str, Kind, bytearray]] = []
        pieces, head = opened(bucket), bytes(bucket[: HEAD.size])
        if head == self._before:
            return whole
        for piece, data in pieces:
            self._place(piece, data)
            if piece.last == piece.kind.shape[0]:
                assert self._part is not None
                value, self._part = self._part[1], None
                self.given[piece.name] = piece.kind, self._seen.add_bytes(piece.name, piece.kind, value)
                whole.append((piece.name, piece.kind, value))
        self._before = head
        return whole

    def _place(self, piece: Piece, data: memoryview) -> None:
        if self._part is None:
            if piece.name in self.given:
                raise PushRefused(f"{piece.name} comes a second time")
            wanted = Piece(piece.name, piece.kind, 0, piece.last)
            self._part = wanted, bytearray()
        else:
            before = self._part[0]
            wanted = Piece(before.name, before.kind, before.last, piece.last)
        if piece != wanted or not piece.first < piece.last <= piece.kind.shape[0]:
            raise PushRefused(
                f"rows {piece.first} to {piece.last} of {piece.name} ({piece.kind}) come where {wanted.name} "
                f"({wanted.kind}) goes on from row {wanted.first}: push again"
            )
        self._part = piece, self._part[1]
        self._part[1].extend(data)

    def check(self, fingerprint: str) -> None:
        """Raises PushRefused unless all has come that has this fingerprint."""
        if self._part is not None:
            piece = self._part[0]
            raise PushRefused(f"{piece.name} ends with row {piece.last} of {piece.kind.shape[0]}: push again")
        found = self._seen.hexdigest()
        if found != fingerprint:
            raise PushRefused(
                f"the fingerprint of what came is {found[:12]}, that of what was sent {fingerprint[:12]}: push again"
            )
