"""A reporter that keeps the lines that a run says."""

from typing import Any

from rlhf.flows.graph.build import Node
from rlhf.stages.worker.protocol import Progress


class Lines:
    """What a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def stage_started(self, node: Node) -> None:
        pass

    def progress(self, node: Node, event: Progress) -> None:
        pass

    def compiling(self, node: Node) -> None:
        pass

    def line(self, text: str) -> None:
        self.lines.append(text)

    def stage_ended(self, node: Node, state: str, manifest: dict[str, Any], seconds: float) -> None:
        pass

    def run_ended(self) -> None:
        pass
