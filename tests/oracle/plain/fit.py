"""Stages that pass over a table of examples: SFT, reward models, preference learning, distillation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracle.plain import losses, order
from tests.oracle.plain.model import Model
from tests.oracle.plain.optim import Optimizer
from tests.oracle.plain.tables import Row

StepLoss = Callable[[list[int]], Tensor]
"""Rows of a step -> its loss."""


def fit(settings: Any, tuned: Model, sizes: Sequence[int], seed: int, loss: StepLoss) -> int:
    """Trains `tuned` in place, one optimizer step for each step of the table; the number of steps."""
    steps = order.steps(sizes, settings["epochs"], seed, settings["examples_per_step"], settings.get("tokens_per_step"))
    optimizer = Optimizer(tuned.trained, settings["optimizer"], len(steps))
    for step in steps:
        optimizer.step(loss(step))
    return len(steps)


def sft(settings: Any, tuned: Model, rows: Sequence[Row], seed: int) -> int:
    """-log p of the tokens that the mask says, mean over those of the step."""

    def trained(row: Row) -> list[int]:
        mask = row["completion_mask"]
        return [i for i in range(len(row["completion_ids"])) if mask is None or mask[i]]

    def loss(step: list[int]) -> Tensor:
        count = sum(len(trained(rows[i])) for i in step)
        found = [tuned.logps(rows[i]["prompt_ids"], rows[i]["completion_ids"])[0][trained(rows[i])] for i in step]
        logps = torch.cat(found)
        # DFT (Wu et al., arXiv:2508.05629): a token weighs its probability.
        weights = logps.detach().exp() if settings["loss"] == "dft" else 1.0
        return -(weights * logps).sum() / count

    sizes = [len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rows]
    return fit(settings, tuned, sizes, seed, loss)


def reward(settings: Any, tuned: Model, rows: Sequence[Row], seed: int) -> int:
    """Bradley-Terry, mean over the pairs of the step."""

    def loss(step: list[int]) -> Tensor:
        found = []
        for row in (rows[i] for i in step):
            sides = (tuned.score(row["prompt_ids"], row[f"{side}_ids"]) for side in ("chosen", "rejected"))
            margin = settings["margin_weight"] * (row["margin"] or 0.0)
            found.append(losses.bradley_terry(*sides, margin, settings["centering"]))
        return torch.stack(found).mean()

    return fit(settings, tuned, _pair_sizes(rows), seed, loss)


def _pair_sizes(rows: Sequence[Row]) -> list[int]:
    return [sum(len(r[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")) for r in rows]


def preference(settings: Any, tuned: Model, reference: Model | None, rows: Sequence[Row], seed: int) -> int:
    """The DPO family and the losses without a reference, mean over the pairs of the step."""
    alpha = settings["ld_alpha"]

    def summed(module: Model, row: Row, side: str) -> Tensor:
        other = {"chosen": "rejected", "rejected": "chosen"}[side]
        found = module.logps(row["prompt_ids"], row[f"{side}_ids"])[0]
        # LD-DPO (Liu et al., arXiv:2409.06411): tokens past the other side's length weigh less.
        shared = len(row[f"{other}_ids"])
        return found[:shared].sum() + alpha * found[shared:].sum()

    def loss(step: list[int]) -> Tensor:
        found = []
        for row in (rows[i] for i in step):
            sides = {side: summed(tuned, row, side) for side in ("chosen", "rejected")}
            sides["whole"] = tuned.logps(row["prompt_ids"], row["chosen_ids"])[0].sum()
            if reference is not None:
                with torch.no_grad():
                    sides |= {f"ref_{side}": summed(reference, row, side) for side in ("chosen", "rejected")}
            found.append(losses.preference(settings, sides, (len(row["chosen_ids"]), len(row["rejected_ids"]))))
        return torch.stack(found).mean()

    return fit(settings, tuned, _pair_sizes(rows), seed, loss)


def labelled(settings: Any, tuned: Model, reference: Model, rows: Sequence[Row], seed: int) -> int:
    """KTO and APO-zero on single completions. The reference point is the step's, from completions of other prompts."""

    def ratio(row: Row, tokens: Sequence[int]) -> Tensor:
        with torch.no_grad():
            ref = reference.logps(row["prompt_ids"], tokens)[0].sum()
        return tuned.logps(row["prompt_ids"], tokens)[0].sum() - ref

    def other(i: int) -> list[int]:
        # The next row with another prompt: a fixed choice, so that nothing is drawn.
        n = len(rows)
        places = ((i + k) % n for k in range(1, n))
        return next(rows[j]["completion_ids"] for j in places if rows[j]["prompt_ids"] != rows[i]["prompt_ids"])

    def loss(step: list[int]) -> Tensor:
        point = 0.0
        if settings["loss"] == "kto":
            with torch.no_grad():
                point = max(0.0, float(torch.stack([ratio(rows[i], other(i)) for i in step]).mean()))
        found = [
            losses.unpaired(settings, ratio(rows[i], rows[i]["completion_ids"]), rows[i]["label"], point) for i in step
        ]
        return torch.stack(found).mean()

    sizes = [len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rows]
    return fit(settings, tuned, sizes, seed, loss)


def apart(rows: Sequence[Row]) -> list[Row]:
    """Pairs as single completions, the chosen ones good."""
    return [
        {"prompt_ids": r["prompt_ids"], "completion_ids": r[f"{side}_ids"], "label": side == "chosen"}
        for r in rows
        for side in ("chosen", "rejected")
    ]


def distill(settings: Any, tuned: Model, teacher: Model, rows: Sequence[Row], seed: int) -> int:
    """The divergence to the teacher on the table's completions, mean over the tokens of the step."""

    def loss(step: list[int]) -> Tensor:
        found = []
        for row in (rows[i] for i in step):
            with torch.no_grad():
                wanted = teacher.logits(row["prompt_ids"], row["completion_ids"])
            student = tuned.logits(row["prompt_ids"], row["completion_ids"])
            mask = torch.tensor(row["completion_mask"] or [1] * len(row["completion_ids"]), dtype=torch.bool)
            found.append(losses.divergence(student, wanted, settings)[mask])
        return torch.cat(found).mean()

    sizes = [len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rows]
    return fit(settings, tuned, sizes, seed, loss)
