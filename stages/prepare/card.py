"""The data card: one HTML page, without scripts or links, of what a preparation read, dropped and wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.prepare.settings import Config

SAMPLES = 3
LETTERS = 12
_TEXT = 600

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Data card</title>
<style>
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b2430; --soft: #586474; --line: #dde2e8;
  --bar: #0b66c3; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1a2028; --ink: #e4e8ee; --soft: #9ba7b6;
  --line: #303946; --bar: #6cb0f7; } }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .8rem 1.2rem;
  margin: 1rem 0; overflow-x: auto; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: .2rem 0 .5rem; }
h3 { font-size: 1rem; margin: .8rem 0 .2rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem .9rem .15rem 0; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } th { color: var(--soft); font-weight: 600; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .1rem 0 .5rem; font-size: .85em; }
table.sample { border-left: 3px solid var(--line); padding-left: .8rem; margin-bottom: .8rem; }
rect { fill: var(--bar); } .soft { color: var(--soft); } figure { display: inline-block; margin: 0 1.5rem .5rem 0; }
</style></head><body>
<h1>Data card</h1>
<section><h2>Sources</h2><table><tr><th>source</th><th>settings</th></tr>
{% for s in sources %}<tr><td>{{ s.source }}</td><td>{{ s.settings }}</td></tr>{% endfor %}</table></section>
<section><h2>Records</h2><table><tr><th>fate</th><th class="n">records</th><th class="n">share</th></tr>
{% for name, n in fates %}<tr><td>{{ name }}</td><td class="n">{{ n }}</td><td class="n">{{ n | share }}</td></tr>
{% endfor %}</table></section>
<section><h2>Rows</h2><table><tr><th>output</th><th class="n">rows</th><th>column</th><th class="n">mean</th>
<th class="n">median</th><th class="n">95 %</th><th class="n">longest</th></tr>
{% for name, n in metrics.rows.items() %}{% for column, t in metrics.tokens.get(name, {}).items() %}
<tr><td>{{ name if loop.first }}</td><td class="n">{{ n if loop.first }}</td><td>{{ column }}</td>
<td class="n">{{ t.mean | round(1) }}</td><td class="n">{{ t.p50 | round(1) }}</td>
<td class="n">{{ t.p95 | round(1) }}</td><td class="n">{{ t.max | int }}</td></tr>
{% else %}<tr><td>{{ name }}</td><td class="n">{{ n }}</td></tr>{% endfor %}{% endfor %}</table>
{% if metrics.dropped_rows %}<h3>Dropped rows</h3><table>{% for reason, n in metrics.dropped_rows.items() %}
<tr><td>{{ reason }}</td><td class="n">{{ n }}</td></tr>{% endfor %}</table>{% endif %}
{% for name, n in metrics.repeated_prompts.items() if n %}<p>{{ n }} rows of {{ name }} had a prompt and answer that
another row has; they are one row.</p>{% endfor %}</section>
<section><h2>Lengths in tokens</h2>{% for title, bars, last in charts %}
<figure><figcaption class="soft">{{ title }}, 0 to {{ last }}</figcaption>
<svg width="300" height="80" role="img" aria-label="{{ title }}">{% for x, height, width, tip in bars %}
<rect x="{{ x }}" y="{{ 80 - height }}" width="{{ width }}" height="{{ height }}"><title>{{ tip }}</title></rect>
{% endfor %}</svg></figure>{% endfor %}</section>
<section><h2>Steps</h2><table><tr><th>step</th><th class="n">records in</th><th>counted</th></tr>
{% for step, counts in steps.items() %}<tr><td>{{ step }}</td><td class="n">{{ counts["in"] }}</td>
<td>{% for k, v in counts.items() if k != "in" and v %}{{ k }} {{ v }}{{ ", " if not loop.last }}{% endfor %}</td></tr>
{% endfor %}</table></section>
<section><h2>Dead letters</h2>{% if letters %}<table><tr><th>source</th><th class="n">record</th><th>step</th>
<th>reason</th></tr>{% for l in letters %}<tr><td>{{ l.source }}</td><td class="n">{{ l.record }}</td>
<td>{{ l.step }}</td><td>{{ l.reason | short }}</td></tr>{% endfor %}</table>
<p class="soft">The first {{ letters | length }} of
{{ metrics.records.dead }}; all of them, with their text, are in dead/dead.parquet.</p>{% else %}<p>None.</p>{% endif %}
</section>
<section><h2>Samples</h2>{% for name, rows in samples.items() %}<h3>{{ name }}</h3>{% for row in rows %}
<table class="sample">{% for column, text in row.items() %}
<tr><th>{{ column }}</th><td><pre>{{ text | short }}</pre></td></tr>
{% endfor %}</table>{% endfor %}{% endfor %}</section>
</body></html>
"""


def write_card(out: Path, facts: dict[str, Any], config: Config) -> None:
    """Write `card.html` beside the outputs; `facts` is the content of `statistics.json`."""
    import jinja2

    metrics = facts["metrics"]
    read = max(1, metrics["records"]["read"])
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    environment.filters["share"] = lambda n: f"{100 * n / read:.2f} %"
    environment.filters["short"] = lambda t: t if len(t) <= _TEXT else f"{t[:_TEXT]} … ({len(t)} characters)"
    page = environment.from_string(TEMPLATE).render(
        sources=[{"source": s.source, "settings": _settings(s)} for s in config.all_sources()],
        fates=_fates(metrics),
        metrics=metrics,
        charts=list(_charts(facts["histograms"])),
        steps=facts["steps"],
        letters=_head(out / "dead" / "dead.parquet", LETTERS, ["source", "record", "step", "reason"]),
        samples={name: _samples(out, name) for name in metrics["rows"]},
    )
    # What cannot be written as UTF-8 came as an escape of broken text.
    (out / "card.html").write_bytes(page.encode("utf-8", "backslashreplace"))


def _settings(source: Any) -> str:
    values = source.model_dump(exclude_defaults=True, exclude={"source"})
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _fates(metrics: dict[str, Any]) -> list[tuple[str, int]]:
    records = metrics["records"]
    dropped = [(f"dropped: {reason}", n) for reason, n in metrics["dropped_records"].items()]
    fates = [("kept", records["kept"]), ("equal to another", records["duplicates"]), *dropped]
    return [("read", records["read"]), *fates, ("dead letters", records["dead"])]


def _charts(histograms: dict[str, Any]) -> Any:
    for output, columns in histograms.items():
        for column, found in columns.items():
            edges, counts = found["edges"], found["counts"]
            most, width = max(counts, default=0) or 1, 300 / max(1, len(counts))
            bars = [
                (
                    round(i * width, 2),
                    round(78 * n / most, 2),
                    round(width - 1, 2),
                    f"{edges[i]} to {edges[i + 1] - 1}: {n}",
                )
                for i, n in enumerate(counts)
            ]
            yield f"{output} {column}", bars, edges[-1] - 1


def _head(path: Path, count: int, columns: list[str]) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for batch in pq.ParquetFile(path).iter_batches(batch_size=count, columns=columns):
        rows += batch.to_pylist()
        if len(rows) >= count:
            break
    return rows[:count]


def _samples(out: Path, output: str) -> list[dict[str, str]]:
    """The texts of the first rows of an output."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = min((out / output).glob("part-*.parquet"))
    texts = [f.name for f in pq.read_schema(path) if f.type == pa.string() and f.name not in ("id", "content")]
    return [{k: v for k, v in row.items() if v} for row in _head(path, SAMPLES, texts)]
