"""The report as pages: one in HTML, and one in GitHub's Markdown.

All pages are rendered with `environment`, and every HTML page has a `content_policy`.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from conformance.reports import wording
from conformance.text import element, plural, short
from conformance.words import say


class _Compiled(BytecodeCache):
    """Compiled templates in memory: to compile one takes ten times as long as to render it."""

    def __init__(self) -> None:
        self._kept: dict[str, CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self._kept.get(bucket.key + bucket.checksum)

    def dump_bytecode(self, bucket: Bucket) -> None:
        assert bucket.code is not None
        self._kept[bucket.key + bucket.checksum] = bucket.code


@cache
def _compiled(*options: Any) -> _Compiled:
    """Return what environments with these options have compiled; options change the code."""
    return _Compiled()


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
        bytecode_cache=_compiled(*options.items()),
        **options,
    )
    made.globals |= {"words": wording, "element": element, "short": short}
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
