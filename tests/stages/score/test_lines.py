"""Lines of a journal of scores: a line that is damaged costs one score, and is never taken."""

from rlhf.stages.common.journal import Journal
from rlhf.stages.score import stage as score
from rlhf.stages.score.settings import Reward
from rlhf.tuning.rewards.samples import Outcome
from rlhf.tuning.rows import CompletionRow
from tests.stages.score.support import context
from tests.stages.training.support import Folder


def test_a_line_that_a_kill_has_cut_costs_one_score(tmp_path, rollouts):
    ctx, log = context(tmp_path / "a", rollouts, rewards={"exact": Reward(function="exact_match")})
    score.run(ctx)
    (file,) = ctx.work.glob("*.jsonl")
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    row = CompletionRow(place=7, prompt_id="p", prompt_ids=[1], token_ids=[1], logprobs=[0.0])
    Journal(ctx, "reward exact", "journal-exact").add([row], [Outcome(0.5)])
    found = Journal(ctx, "reward exact", "journal-exact")
    assert found.get([row]) == [Outcome(0.5)]
    assert any(line.startswith("reward exact: 4 finished scores are there") for line in log)


def test_a_line_that_a_disk_has_changed_costs_one_score_and_is_never_taken(tmp_path):
    ctx, _ = context(tmp_path / "a", Folder(tmp_path, "none"), rewards={"exact": Reward(function="exact_match")})
    rows = [CompletionRow(place=n, prompt_id="p", prompt_ids=[1], token_ids=[1], logprobs=[0.0]) for n in range(3)]
    journal_ = Journal(ctx, "reward exact", "journal-exact")
    for row in rows:
        journal_.add([row], [Outcome(row.place / 4)])
    (file,) = ctx.work.glob("*.jsonl")
    whole = file.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            read = Journal(ctx, "reward exact", "journal-exact")
            kept = [read.get([row]) for row in rows]
            assert all(k in (None, [Outcome(row.place / 4)]) for k, row in zip(kept, rows, strict=True))
            assert kept.count(None) <= 2
