"""What a run does between its artifacts, a second time: plain torch in float64, one completion at a time.

Written from the papers and from docs/explanation/rules.md; nothing of `stages` or `tuning` is imported. Slow on
purpose: no packing, no padding, no masks in matrices, no compilation.
"""
