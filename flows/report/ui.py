"""The pages of `rlhf ui`, made from the store when a browser asks for them.

    /                                   names of policies, runs and sweeps
    /runs/NAME/report.html              a run's report, while the run writes it
    /runs/NAME/lineage.html             its stages: inputs, origins, and the reasons that they were not cached
    /sweeps/NAME/report.html            the comparison of a sweep's settings
    /compare.html?first=RUN&second=RUN  the differences of two runs
    /artifacts/STAGE/KEY.html           an artifact with all its ancestors, also those of other runs

The addresses are those of the saved pages, so that links between them hold in both. Nothing is written. The pages have
no scripts; a browser reads the pages of an unfinished run again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from rlhf.flows.graph.build import Input, Node
from rlhf.flows.graph.changes import reasons_of
from rlhf.flows.records import SWEEP, SWEEPS, UnknownRun, readable_runs, status_of, summary_of, sweeps
from rlhf.flows.report.comparison import compare
from rlhf.flows.report.formats import LABELS
from rlhf.flows.report.page import render, rendered
from rlhf.flows.report.run_view import RunView
from rlhf.flows.report.sweep import sweep_page
from rlhf.stages.contract.definition import StageConfig
from rlhf.stages.store import registry, runs
from rlhf.stages.store.artifacts import Artifact, ArtifactError, Store
from rlhf.stages.store.manifests import is_inside

HOSTS = ["127.0.0.1", "localhost", "[::1]"]
"""Names of this machine: a page of another site cannot ask by one of its own."""
REFRESH_SECONDS = 10
STAMP = ("ETag", "etag", "LastModified", "updated", "mtime", "size")
"""Facts of a listing that change with a file, on several file systems."""
Record = dict[str, Any]
PAGES = 32
"""Reports of finished runs in memory."""


def make_app(store: Store) -> Starlette:
    """Return the application; each request is answered in a thread."""
    ui = _Pages(store)
    routes = {
        "/": ui.index,
        "/compare.html": ui.compare,
        "/runs/{run}/report.html": ui.report,
        "/runs/{run}/lineage.html": ui.lineage,
        "/sweeps/{sweep}/report.html": ui.sweep,
        "/artifacts/{stage}/{key}.html": ui.artifact,
    }
    return Starlette(
        routes=[Route(path, _answer(page), methods=["GET"]) for path, page in routes.items()],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)],
    )


def _answer(page: Callable[[Request], Response]) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        try:
            return page(request)
        except UnknownRun as e:
            return _page("ui_error.html.j2", 404, said=str(e))
        except (ArtifactError, OSError, ValueError) as e:
            return _page("ui_error.html.j2", 503, said=f"{type(e).__name__}: {e}")

    return answer


def _page(template: str, status: int = 200, refresh: bool = False, **values: Any) -> Response:
    headers = {"Refresh": str(REFRESH_SECONDS)} if refresh else {}
    # Texts of models may hold half a surrogate pair.
    body = rendered(template, {"labels": LABELS, **values}).encode(errors="replace")
    return HTMLResponse(body, status, headers)


class _Pages:
    """The pages of one store."""

    def __init__(self, store: Store):
        self._store = store
        self._report = functools.lru_cache(PAGES)(self._rendered)
        self._known: dict[str, tuple[list[Any], Record]] = {}
        """Records of runs by name, with the stamps of their files."""
        self._reading = threading.Lock()

    def _runs(self) -> list[Record]:
        """Return every readable run, oldest first; one listing of the store finds those that changed."""
        with self._reading:
            return self._runs_now()

    def _runs_now(self) -> list[Record]:
        found = self._store.fs.find(self._store.join(runs.FOLDER), detail=True)
        stamps: dict[str, list[Any]] = {}
        for path, info in sorted(found.items()):
            *_, name, file = path.split("/")
            if file == runs.HEAD or file.startswith("nodes-"):
                stamps.setdefault(name, []).append([file, *(info.get(part) for part in STAMP)])
        changed = [name for name in stamps if is_inside(name) and self._known.get(name, ([],))[0] != stamps[name]]
        for record in readable_runs(self._store, changed):
            self._known[record["name"]] = stamps[record["name"]], record
        self._known = {name: known for name, known in self._known.items() if known[0] == stamps.get(name)}
        return sorted((record for _, record in self._known.values()), key=lambda record: record["started"])

    def index(self, request: Request) -> Response:
        rows = [summary_of(record, self._store) for record in reversed(self._runs())]
        of_names = {name: registry.history(self._store, name)[-1] for name in registry.names(self._store)}
        evaluated = {label for row in rows for label in row["scores"]}
        return _page(
            "ui_index.html.j2",
            store=self._store.shown,
            runs=rows,
            # The policies of a backfill are in its report.
            policies=[label for label in LABELS if label in evaluated],
            names=of_names,
            sweeps=sweeps(self._store)[::-1],
        )

    def report(self, request: Request) -> Response:
        record = self._record(request.path_params["run"])
        if status_of(record, self._store) == "running":
            return HTMLResponse(self._rendered(record["name"], ""), headers={"Refresh": str(REFRESH_SECONDS)})
        # Saved anew by each change.
        return HTMLResponse(self._report(record["name"], f"{record.get('saved')} {record['status']}"))

    def lineage(self, request: Request) -> Response:
        record = self._record(request.path_params["run"])
        view = RunView(self._store, record)
        earlier = [r for r in self._runs() if r["started"] < record["started"]]
        rows = [
            entry | {"name": name} | self._origin(record, name, view.artifact(name), earlier)
            for name, entry in record["nodes"].items()
        ]
        running = status_of(record, self._store) == "running"
        return _page("ui_lineage.html.j2", refresh=running, record=record, rows=rows, graph=placed(rows))

    def _origin(
        self, record: Mapping[str, Any], name: str, artifact: Artifact | None, earlier: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the run that made a node's artifact, its inputs among the run's nodes, and why it was not cached."""
        if artifact is None:
            return {"made_by": None, "inputs": [], "reasons": []}
        nodes = {(e["stage"], e["key"]): node for node, e in record["nodes"].items()}
        refs = {role: (ref["stage"], ref["key"]) for role, ref in artifact.manifest["inputs"].items()}
        inputs = {role: Input(nodes.get(ref, ref[0])) for role, ref in refs.items()}
        reasons: list[str] = []
        if record["nodes"][name]["state"] == "made":
            node = Node(name, artifact.stage, StageConfig(), inputs, 0)
            parts = artifact.manifest["key_parts"]
            reasons, _ = reasons_of(self._store, record["recipe"]["name"], node, parts, artifact.key, earlier)
        of = list(dict.fromkeys(source.node for source in inputs.values()))
        return {"made_by": artifact.manifest["run"], "inputs": of, "reasons": reasons}

    def artifact(self, request: Request) -> Response:
        stage, key = request.path_params["stage"], request.path_params["key"]
        found = self._store.get(stage, key) if is_inside(stage) and is_inside(key) else None
        if found is None:
            raise UnknownRun(f"no artifact {stage}/{key} in {self._store.shown}")
        used = [
            (record["name"], name)
            for record in self._runs()
            for name, entry in record["nodes"].items()
            if (entry["stage"], entry.get("digest")) == (stage, found.digest)
        ]
        return _page("ui_artifact.html.j2", artifact=found, ancestors=ancestors(found), used=used)

    def sweep(self, request: Request) -> Response:
        name = request.path_params["sweep"]
        record = self._store.read_json(SWEEPS, name, SWEEP) if is_inside(name) else None
        if record is None:
            raise UnknownRun(f"no sweep {name} in {self._store.shown}")
        return HTMLResponse(sweep_page(self._store, record).encode(errors="replace"))

    def compare(self, request: Request) -> Response:
        names = [request.query_params.get(which, "") for which in ("first", "second")]
        views = [RunView(self._store, self._record(name)) for name in names]
        return _page("ui_compare.html.j2", found=compare(*views))

    def _record(self, name: str) -> Mapping[str, Any]:
        found = runs.read(self._store, name) if is_inside(name) else None
        if found is None:
            raise UnknownRun(f"no run {name!r} in {self._store.shown}")
        record: Mapping[str, Any] = found
        return record

    def _rendered(self, name: str, version: str) -> bytes:
        return render(self._store, self._record(name)).encode(errors="replace")


def placed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns and lines of a drawing of nodes: a column by the longest way to a node, lines by its stage."""
    column: dict[str, int] = {}
    cells: dict[str, dict[int, list[str]]] = {}
    for row in rows:
        column[row["name"]] = 1 + max((column.get(name, -1) for name in row["inputs"]), default=-1)
        cells.setdefault(row["stage"], {}).setdefault(column[row["name"]], []).append(row["name"])
    lines: dict[str, int] = {}
    places, height = dict[str, tuple[int, int]](), 0
    for stage, of_stage in cells.items():
        lines[stage] = height
        places |= {name: (x, height + i) for x, names in of_stage.items() for i, name in enumerate(names)}
        height += max(map(len, of_stage.values()))
    return {"places": places, "lines": lines, "width": 1 + max(column.values(), default=0), "height": height}


def ancestors(artifact: Artifact) -> list[dict[str, Any]]:
    """Return an artifact and all artifacts that it was made of, each once, by the manifests of any runs, nearest first.

    Each has stage, key, digest, run, started, seconds, role, depth, and `is_there`: whether the store has it.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    store = artifact.store
    level = [({"stage": artifact.stage, "key": artifact.key, "digest": artifact.digest}, "")]
    depth = 0
    while level:
        following = []
        for ref, role in level:
            if (ref["stage"], ref["digest"]) in rows:
                continue
            found = store.with_digest(ref["stage"], ref["key"], ref["digest"])
            manifest = {} if found is None else found.manifest
            row: dict[str, Any] = {part: ref[part] for part in ("stage", "key", "digest")}
            row |= {part: manifest.get(part) for part in ("run", "started", "seconds")}
            rows[ref["stage"], ref["digest"]] = row | {"role": role, "depth": depth, "is_there": found is not None}
            inputs = manifest.get("inputs", {})
            # The policy of another run, which it names in its settings.
            inputs |= {"policy": manifest["config"]} if ref["stage"] == "start" and manifest else {}
            following += [(of, name) for name, of in inputs.items()]
        level, depth = following, depth + 1
    return list(rows.values())
