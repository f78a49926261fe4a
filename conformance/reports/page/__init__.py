"""The report as pages: one in HTML, and one in GitHub's Markdown.

All pages are rendered with `environment`, and every HTML page has a `content_policy`.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conformance.reports import wording
from conformance.text import element, plural
from conformance.words import say


def environment(folder: Path, **options: Any) -> Environment:
    """Return a Jinja environment that loads templates from a folder and escapes values.

    Values of type `Markup` are not escaped. `options` are further options of the environment.
    """
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    made.globals |= {"words": wording, "element": element}
    made.filters |= {
        "say": say,
        "ratio": wording.ratio,
        "number": wording.number,
        "plural": plural,
        "listed": wording.listed,
        "shape": wording.shape,
        "parts": wording.parts,
    }
    return made


def content_policy(style: str, script: str = "") -> str:
    """Return a content security policy that allows only this style and script, and no fetching."""
    sources = [f"style-src '{_hash(style)}'"]
    sources += [f"script-src '{_hash(script)}'"] if script else []
    return f"default-src 'none'; base-uri 'none'; form-action 'none'; {'; '.join(sources)}"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
