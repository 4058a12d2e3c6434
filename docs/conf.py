"""Sphinx builds a site from the repository's Markdown: `make docs`.

The pages are the files that GitHub shows. The navigation is here, so that they need no directives.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

project = "rlhf-pipeline"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = project
html_copy_source = False
root_doc = "README"
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**", "examples/README.md"),
    *(f"{package}/{pages}" for package in ("flows", "stages", "tuning", "tests") for pages in ("*.md", "**/*.md")),
]
exclude_patterns = ["**/.venv*", "**/node_modules", ".*"]
# A link to a heading is checked too.
myst_heading_anchors = 4
myst_linkify_fuzzy_links = False
# Fences of diffs and logs are no complete programs.
suppress_warnings = ["misc.highlighting_failure"]

NAVIGATION = {
    "Tutorials": ["first-run", "your-data-and-reward", "an-agent", "on-a-gpu"],
    "Guides": [
        *("recipes", "data", "rl", "rewards", "rollouts", "agents", "environments", "evaluation", "gates", "names"),
        *("serving", "operations", "infra", "prefect", "workers", "cluster", "fit", "a-stage", "extend", "from-trl"),
        "from-axolotl",
    ],
    "Reference": [
        "settings",
        "commands",
        "metrics",
        "environment-variables",
        "files",
        "tables",
        "json",
        "compiled-programs",
    ],
    "Explanation": ["rules", "decisions/README", "glossary", "benchmarks", "devices", "not-here"],
}
FOLDERS = {
    "Tutorials": "docs/tutorials",
    "Guides": "docs/guides",
    "Reference": "docs/reference",
    "Explanation": "docs/explanation",
}
PROJECT = ["docs/README", "examples/README", "CONTRIBUTING", "CHANGELOG"]


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Appends the navigation to the first page, and the list of decisions to theirs."""
    if name == root_doc:
        parts = {title: [f"/{FOLDERS[title]}/{page}" for page in pages] for title, pages in NAVIGATION.items()}
        parts["Project"] = [f"/{page}" for page in PROJECT]
        source[0] += "".join(toctree(pages, f":caption: {title}\n") for title, pages in parts.items())
        packages = [":glob:\n", "/flows/**\n/stages/**\n/tuning/**\n/tests/**"]
        source[0] += toctree([packages[1]], f":caption: Packages\n{packages[0]}")
    if name == "docs/explanation/decisions/README":
        source[0] += toctree(["*"], ":glob:\n")
    # GitHub's fences have more words than a language: `sh no-run`, `yaml file=mine.yaml`.
    source[0] = re.sub(r"^(\s*```\w+) [^\n]*$", r"\1", source[0], flags=re.MULTILINE)


def toctree(pages: list[str], options: str) -> str:
    """A hidden list of pages."""
    return "\n\n```{toctree}\n:hidden:\n" + options + "\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
