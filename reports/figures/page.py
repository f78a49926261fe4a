"""The figure as a page of its own: what was asked, the command that asks again, and versions."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conformance.cases.case import Case
from conformance.reports.figures.drawing import how, svg, title, told
from conformance.reports.figures.picture import Picture

HERE = Path(__file__).parent


def page(picture: Picture, case: Case, command: str, versions: Mapping[str, str]) -> str:
    """One HTML file that fetches nothing; its policy lets its own style pass and nothing else."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title(picture),
        how=how(picture),
        case=case,
        facts=facts(case, picture.subject.dtype),
        figure=svg(picture, alone=False, headed=False),
        told=told(picture),
        command=command,
        versions=versions,
        style=style,
        policy="default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src 'sha256-{digest}'",
    )


def facts(case: Case, dtype: str) -> dict[str, str]:
    """Sizes and masks of the case, in words."""
    shape, problem = case.shape, case.problem(dtype)
    found = {
        "Sizes": f"batch {shape.batch}, {shape.heads} heads ({shape.kv_heads} of key and value), "
        f"{shape.query_length} queries, {shape.key_length} keys, head size {shape.head_size}",
    }
    masks = []
    if problem.mask is not None:
        masks.append(f"mask {list(problem.mask.shape)}")
    if problem.causal is not None:
        masks.append(f"causal, {problem.causal}")
    if problem.attn_bias is not None:
        masks.append(f"bias {list(problem.attn_bias.shape)}")
    return found | {"Masks": ", ".join(masks) or "none"}
