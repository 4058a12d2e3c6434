"""A reporter that keeps the lines that a run says."""


class Lines:
    """What a run says; all else that a reporter is told it forgets."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def _forget(self, *_: object) -> None:
        pass

    stage_started = progress = compiling = stage_ended = run_ended = _forget
