"""Pages made of `reports/published/site.json`, which `mha-conformance publish` writes.

One for each convention, requirement and defect; "can I use", the translator and the badges; and the
history on the page of an implementation. Nothing but the standard library is needed.
"""

from __future__ import annotations

import ast
import html
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SITE = "reports/published/site.json"
DEFECTS = "docs/site/defects.toml"
SPECIAL = re.compile(r"[\\`*_{}\[\]()#+!|~-]")
CAUSAL = "Causal flag, fewer queries than keys"

ASKED = {
    "True in a mask": "Does True in a mask attend, or does it block?",
    "0 and 1, as floats": "Are 0 and 1 in a float mask added, or do they select keys?",
    "0 and 1, as integers": "Are 0 and 1 in an integer mask added, or do they select keys?",
    "0 and −inf": "Does a float mask of 0 and −inf block where it is −inf?",
    "A fully masked query gets": "What does a fully masked query get: NaN, zeros, or a "
    "mean of the values?",
    "… and gradients": "Are gradients finite beside a fully masked query?",
    CAUSAL: "With fewer queries than keys, as beside a cache, is the causal flag aligned at the "
    "start (top-left), or at the end (bottom-right)?",
    "Causal flag beside a mask": "With a causal flag and a mask, do both hold?",
    "NaN in a blocked key": "Does a NaN in a blocked key, such as padding, reach the output?",
    "NaN in a blocked value": "Does a NaN in a blocked value, such as padding, reach the output?",
    "Returned weights": "Are attention weights returned, for each head or averaged?",
    "Returned log-sum-exp": "Is the log-sum-exp returned, and in which base?",
    "Log-sum-exp without a key": "What is the log-sum-exp of a query that sees no key?",
    "Returned largest logit": "Is the largest logit returned, and of which logits?",
    "Largest logit without a key": "What is the largest logit of a query that sees no key?",
    "No key at all": "What happens without any key?",
    "No batch axis": "Are inputs without a batch axis accepted?",
    "Window": "Does a window count the query's own key, and where is it aligned?",
    "Soft cap": "How are logits capped, and is a mask applied before or after that?",
    "Sinks": "How are attention sinks given?",
    "ALiBi": "How is the bias of ALiBi counted, and where is it aligned?",
    "Rotary": "Do rotary embeddings pair halves, or neighbours?",
    "Rotary, scaled": "Are rotary embeddings scaled by a configuration, as by YaRN or Llama 3?",
    "Rotary, on axes": "Do rotary pairs turn by time, height and width, as in Qwen2-VL (mrope)?",
    "Query/key norm": "Are queries and keys normalised in each head?",
    "Lengths": "Which argument takes lengths, and what do they count?",
    "Chunks": "Which argument keeps attention inside blocks of positions, and where do they begin?",
    "Bidirectional spans": "Which later keys does a query see in a span, such as a prefix or an "
    "image?",
    "Trees of drafted tokens": "Which argument takes a tree of drafted tokens?",
    "Segments, packed": "Which argument keeps packed sequences apart?",
    "Positions": "Which argument takes positions?",
    "Caches, pages": "Is a cache of keys and values taken, in one piece or in pages?",
    "Bits in another batch": "Are the bits of an output the same, whatever else is in the batch?",
    "Bits in another batch, one query": "Are the bits the same, whatever else is in the batch, if "
    "entries have a single query?",
    "Bits of one query alone": "Are the bits the same if queries come one at a time, as in "
    "decoding?",
    "Bits of several queries alone": "Are the bits the same if queries come a few at a time, as in "
    "a prefill in chunks?",
    "Bits of a packed sequence": "Are the bits the same if a sequence is packed with others?",
    "Bits run to run": "Are the bits of outputs and gradients the same from run to run?",
    "Bits on other threads": "Are the bits the same on another number of threads?",
}
"""Each question in full, as a stranger asks it."""

MASKS = r"^probe/masks$|polarity"
MASKED_ROWS = r"fully-masked-row|masked-rows"
LEAKS = r"^probe/leaks$|^bias/high-on-padding|blocked-key"

ABOUT = {
    "True in a mask": MASKS,
    "0 and 1, as floats": MASKS,
    "0 and 1, as integers": MASKS,
    "0 and −inf": MASKS,
    "A fully masked query gets": MASKED_ROWS,
    "… and gradients": MASKED_ROWS,
    CAUSAL: r"^causal/|^scale/with-last-queries|^probe/causal$|causal-alignment",
    "Causal flag beside a mask": r"^causal/with-|with-causal|^probe/pairs$",
    "NaN in a blocked key": LEAKS,
    "NaN in a blocked value": LEAKS,
    "Returned weights": r"^weights\.|returned-weights",
    "Returned log-sum-exp": r"log-sum-exp",
    "Log-sum-exp without a key": r"log-sum-exp",
    "Window": r"window|^feature/(dilation|global-tokens)|^probe/dilation",
    "Returned largest logit": r"max-logit",
    "Largest logit without a key": r"max-logit",
    "Soft cap": r"soft-cap",
    "Sinks": r"sink",
    "ALiBi": r"alibi",
    "Rotary": r"rotary",
    "Rotary, scaled": r"^feature/scaled-",
    "Rotary, on axes": r"^feature/position-axes|^probe/position-axes",
    "Query/key norm": r"^feature/norm",
    "Lengths": r"lengths|^causal/bottom-right|^scale/with-last-queries",
    "Chunks": r"^feature/(chunk|.*with-chunk)",
    "Bidirectional spans": r"^feature/spans|^probe/spans",
    "Trees of drafted tokens": r"^feature/tree|^probe/trees",
    "Segments, packed": r"segments|packed",
    "Positions": r"positions",
    "Caches, pages": r"cache|pages",
    **dict.fromkeys(
        (
            "Bits in another batch",
            "Bits in another batch, one query",
            "Bits of one query alone",
            "Bits of several queries alone",
            "Bits of a packed sequence",
            "Bits run to run",
            "Bits on other threads",
        ),
        r"^probe/repeatability|^bits\.",
    ),
}
"""By question, what cases or requirements hold in their names that are about it."""

SAID = {
    "0 and 1, as floats": {
        "attends": "1 attends, 0 blocks",
        "blocks": "1 blocks, 0 attends",
        "added": "added to the logits",
        "added before the scale": "added to the logits before the scale",
    },
    "0 and −inf": {
        "attends": "−inf attends, 0 blocks",
        "blocks": "−inf blocks, as every number but 0",
        "added": "added: −inf blocks",
    },
    CAUSAL: {"none": "there is no flag"},
}
SAID["0 and 1, as integers"] = SAID["0 and 1, as floats"]
"""By question, answers that only the question's name explains, in full."""

KINDS = {
    "accuracy": "Less accurate than the dtype allows",
    "limitation": "Documented limitations",
    "convention": "Conventions that differ from what is required",
}
"""Kinds of known deviations that are no defects, and what their pages are called."""

Item = Mapping[str, Any]
Site = dict[str, Any]
Defect = tuple[str, Item, list[tuple[Item, Item]]]
"""The name of its page, what is known with the longest reason, and who has it: each
implementation, with what is known of it."""


def read(root: Path) -> Site:
    """Return the data of the site, with answers in full."""
    site: Site = json.loads((root / SITE).read_text(encoding="utf-8"))
    for one in site["implementations"]:
        gpu = [one["gpu"]] if one["gpu"] else []
        if one["device"] == "gpu":
            one["title"] += " (on a GPU)"
        if _alone(one):
            # With another NumPy, one version of the library is not another version of it.
            one["history"] = [point for point in one["history"] if point["now"]]
        for point in (one, *one["history"], *gpu):
            for name, values in point["answers"].items():
                said = SAID.get(name, {})
                point["answers"][name] = [
                    [said.get(value, value), *rest] for value, *rest in values
                ]
        for known in itertools.chain.from_iterable(own["known"] for own in (one, *gpu)):
            known["about"] = [name for name in ABOUT if _is_about(known, name)]
    return site


def _everybody(site: Site) -> Iterator[Item]:
    """Yield each implementation and, after it, what a GPU showed beside the CPU."""
    for one in site["implementations"]:
        yield one
        if one["gpu"] and one["device"] != "gpu":
            yield one | one["gpu"] | {"title": f"{one['title']} on a GPU", "history": []}


def _is_about(known: Item, name: str) -> bool:
    """Return whether a known deviation is about a question, as most cases or requirements say."""
    fits = re.compile(ABOUT[name]).search
    cases = [case for case in known["cases"] if not case.startswith("!")]
    asked = known["requirements"]
    return 2 * sum(map(bool, map(fits, cases))) > len(cases) or (
        bool(asked) and all(map(fits, asked))
    )


def pages(root: Path) -> dict[str, str]:
    """Return path to content of every page, below `docs`."""
    site = read(root)
    defects = list(_defects(site))
    shown = {_key(one): _reproduction(root, one) for _, one, _ in defects}
    made = {
        "can-i-use.md": _can_i_use(site),
        "translator.md": _translator(site),
        "badges/all.md": _badges(site),
        "conventions/all.md": _conventions(site),
        "requirements/all.md": _list(
            "All requirements",
            "Each with the implementations that deviate from it.",
            (
                (f"{one['id']}.md", f"{one['id']}: {one['sentence']}")
                for one in site["requirements"]
            ),
        ),
        "defects/all.md": _all_defects(defects, shown),
    }
    for kind, title in KINDS.items():
        table = _known(site, lambda own, kind=kind: own["kind"] == kind)  # type: ignore[misc]
        made[f"known/{kind}.md"] = f"---\nhide: [toc]\n---\n\n# {title}\n\n{table}\n"
    for name in _questions(site):
        made[f"conventions/{_slug(name)}.md"] = _convention(site, name)
    for one in site["requirements"]:
        made[f"requirements/{one['id']}.md"] = _requirement(site, one)
    for name, one, found in defects:
        made[f"defects/{name}.md"] = _defect(shown[_key(one)], one, found)
    for one in site["implementations"]:
        made[f"badges/{one['key']}.svg"] = badge(*_standing(one))
    return made


def start() -> str:
    """Return the first cards of the start page."""
    return (
        "- **You have a question about a library**: what its masks mean, how it aligns, since "
        "when.\n\n    [Can I use](can-i-use.md), or [every library, question by "
        "question](conventions/all.md)\n\n"
        "- **You have a mask for one library**, and need it for another.\n\n"
        "    [The translator of masks](translator.md)\n"
    )


def beyond(root: Path) -> dict[str, str]:
    """Return what only the site says of each implementation: since when, and its defects' pages."""
    site = read(root)
    defects = list(_defects(site))
    titles = {name: _reproduction(root, one).title for name, one, _ in defects}
    return {
        one["key"]: _history(one) + _its_defects(one, defects, titles)
        for one in site["implementations"]
    }


def _its_defects(one: Item, defects: Sequence[Defect], titles: Mapping[str, str]) -> str:
    links = [
        f"- {_link(titles[page], f'../defects/{page}.md')}"
        for page, _, found in defects
        if any(item["key"] == one["key"] for item, _ in found)
    ]
    if not links:
        return ""
    told = "Each on a page of its own: who else has it, in which versions, and its script."
    return "\n".join(["\n## Its defects", "", told, "", *links, ""])


def _history(one: Item) -> str:
    """Return since when an implementation answers as it does; "" if one version was measured."""
    rows = [
        (_link(question, f"../conventions/{_slug(question)}.md"), _values(values), _text(since))
        for question, values in one["answers"].items()
        if (since := _since(one, question))
    ]
    if not rows:
        return ""
    versions = " → ".join(_text(point["with"]) for point in one["history"])
    return (
        f"\n## Since when\n\nMeasured: {versions}.\n\n"
        + _table(("Convention", "Answer today", "Since"), rows)
        + "\n"
    )


def _questions(site: Site) -> list[str]:
    asked = {name for one in site["implementations"] for name in one["answers"]}
    asked |= {
        name
        for one in site["implementations"]
        for name, feature in one["features"].items()
        if feature["declared"]
    }
    return [name for name in (*site["questions"], *site["features"]) if name in asked]


def _since(one: Item, question: str) -> str:
    """Return since when the answer is today's, and what it was before; "" for one version."""
    course = _course(one, question)
    if sum(len(versions) for *_, versions in course) < 2 or (len(course) == 1 and _alone(one)):
        return ""
    now = next((point["with"] for point in one["history"] if point["now"]), "")
    at = next((at for at, item in enumerate(course) if now in item[3]), len(course) - 1)
    first = f"{course[at][0]}{'' if at else ', the oldest that answers'}"
    others = [*reversed(course[:at]), *course[at + 1 :]]
    return "; ".join([
        first,
        *(f"{since if since == last else f'{since} to {last}'}: {told}"
          for since, last, told, _ in others),
    ])  # fmt: skip


def _course(one: Item, question: str) -> list[tuple[str, str, str, list[str]]]:
    """Return the answers over versions, the oldest first.

    Each with its first and its last version, what was seen, and all versions in full.
    """
    points = [point for point in one["history"] if point["answers"].get(question)]
    groups = [
        list(group)
        for _, group in itertools.groupby(points, lambda it: _seen(it["answers"][question]))
    ]
    brief = [{_version(one, point) for point in group} for group in groups]
    told = []
    for at, group in enumerate(groups):
        # Other packages than the library's made the difference.
        is_brief = all(brief[at].isdisjoint(other) for other in (*brief[:at], *brief[at + 1 :]))
        names = [_version(one, point) if is_brief else point["with"] for point in group]
        values = "; ".join(
            f"{value} ({where})" if where else value
            for value, where, _ in group[-1]["answers"][question]
        )
        told.append((names[0], names[-1], values, [point["with"] for point in group]))
    return told


def _version(one: Item, point: Item) -> str:
    """Return the version of the library itself, or all versions where it did not vary."""
    library = one["library"].replace("_", "-")
    packages = point["with"].split(", ")
    return next((own for own in packages if own.split(" ")[0].endswith(library)), point["with"])


def _has_library(one: Item, packages: str) -> bool:
    library = one["library"].replace("_", "-")
    return any(package.split(" ")[0].endswith(library) for package in packages.split(", "))


def _own_version(one: Item) -> str:
    """Return the version of the library itself, or of all packages where it has none."""
    library = one["library"].replace("_", "-")
    own = [f"{name} {version}" for name, version in one["versions"].items() if library in name]
    # What stands behind a plus says how it was built.
    return own[0].partition("+")[0] if own else _versions(one)


def _alone(one: Item) -> bool:
    """Return whether one version of the library was measured, if with others of what it needs."""
    library = one["library"].replace("_", "-")
    return not any(
        package.split(" ")[0].endswith(library)
        for point in one["history"]
        for package in point["with"].split(", ")
    )


def _seen(values: Iterable[Sequence[Any]]) -> list[str]:
    return sorted(value for value, *_ in values)


# Pages


def _conventions(site: Site) -> str:
    rows = []
    for name in _questions(site):
        groups = _groups(site, name)
        most = sorted(groups.items(), key=lambda item: -len(item[1]))
        seen = [f"{_text(value)} ({len(ones)})" for value, ones in most[:4]]
        more = [f"and {len(most) - 4} more"] if len(most) > 4 else []
        rows.append((_link(ASKED[name], f"{_slug(name)}.md"), ", ".join([*seen, *more]) or "·"))
    return (
        "---\nhide: [toc]\n---\n\n# Every library, question by question\n\n"
        "What implementations do that no definition settles, as experiments saw it, with how many "
        f"do so.\n\n{_table(('Question', 'Seen'), rows)}\n"
    )


def _groups(site: Site, name: str) -> dict[str, list[str]]:
    """Return what was seen, with links to the implementations."""
    groups: dict[str, list[str]] = {}
    for one in site["implementations"]:
        for value, where, _ in one["answers"].get(name, ()):
            beside = f" ({_text(where)})" if where else ""
            groups.setdefault(value, []).append(_implementation(one) + beside)
    return groups


def _convention(site: Site, name: str) -> str:
    summary = [(f"**{_text(value)}**", len(ones), ", ".join(ones)) for value, ones in
               sorted(_groups(site, name).items(), key=lambda item: -len(item[1]))]  # fmt: skip
    shown, lacking = [], []
    for one in site["implementations"]:
        declared = one["features"].get(name, {}).get("declared")
        if one["answers"].get(name) or _how(one, name):
            shown.append(one)
        elif declared is not None:
            lacking.append(_implementation(one))
    rows = [
        (_implementation(one), _how(one, name) or "·", _values(one["answers"].get(name, ())) or "·",
         _text(_since(one, name) or "·"))
        for one in shown
    ]  # fmt: skip
    counted = sum(1 for one in shown if one["answers"].get(name))
    read = f" Read off by experiment in {counted} implementations." if counted else ""
    text = f"# {_text(_title(name))}\n\n**{_text(ASKED[name])}**{read}\n\n"
    if summary:
        heads = ("Seen", "How many", "Implementations")
        text += f"## Who does what\n\n{_table(heads, summary)}\n\n"
    heads = ("Implementation", "Argument", "Seen", "Since")
    columns = [column for column in zip(heads, *rows, strict=True) if {*column[1:]} != {"·"}]
    heads, *rows = zip(*columns, strict=True)
    text += f"## One by one, and since when\n\n{_table(heads, rows)}\n"
    known = _known(site, lambda own: name in own["about"])
    if known:
        text += f"\n## What deviates there\n\n{known}\n"
    if lacking:
        text += f"\n## Without an argument for it\n\n{', '.join(lacking)}\n"
    return text


def _known(site: Site, wanted: Callable[[Item], bool]) -> str:
    """Return a table of known deviations, a line for each reason; "" if there is none."""
    groups: dict[tuple[str, str], list[tuple[Item, Item]]] = {}
    for one in _everybody(site):
        for own in filter(wanted, one["known"]):
            groups.setdefault((own["kind"], own["reason"]), []).append((one, own))
    rows = []
    for (kind, reason), found in sorted(groups.items(), key=lambda it: it[0][0] != "defect"):
        links = [own["link"] for _, own in found if own["link"].startswith("https:")][:1]
        links += [f"../../{own['script']}" for _, own in found if own["script"]][:1]
        told = [f"[{'link' if link.startswith('https:') else 'script'}]({link})" for link in links]
        rows.append((
            ", ".join(_implementation(one) for one, _ in found),
            " ".join([f"**{kind}**:", _text(reason), *told]),
            ", ".join(dict.fromkeys(dtype for _, own in found for dtype in own["dtypes"])),
            _text("; ".join(dict.fromkeys(_having(*pair) for pair in found))),
        ))  # fmt: skip
    return _table(("Implementation", "What is known", "Dtypes", "With"), rows) if rows else ""


def _having(one: Item, known: Item) -> str:
    """Return the versions of the library that have a known deviation."""
    having = [point for point in one["history"] if known["reason"] in point["known"]]
    if not any(_has_library(one, point["with"]) for point in having):
        # Only other packages varied, such as NumPy.
        return _own_version(one)
    brief = list(dict.fromkeys(_version(one, point) for point in having))
    if len(brief) > 2:
        return f"{brief[0]} to {brief[-1]}"
    return ", ".join(brief) or _own_version(one)


def _how(one: Item, name: str) -> str:
    """Return the arguments that a question is about."""
    if name == CAUSAL and one["causal"]:
        flag, alignment = one["causal"]
        return f"`{flag}`, declared as {_text(alignment)}"
    declared = one["features"].get(name, {}).get("declared") or ()
    return ", ".join(f"`{argument}`" for argument in declared)


def _requirement(site: Site, one: Item) -> str:
    titles = {item["key"]: item for item in site["implementations"]}
    rows = [
        (_implementation(titles[key]), ", ".join(f"{n:,} {verdict}" for verdict, n in cell.items()))
        for key, cell in sorted(one["cells"].items(), key=lambda item: -_wrong(item[1]))
    ]
    known = [
        (_implementation(item), _text(known["kind"]), _text(known["reason"]))
        for item in _everybody(site)
        for known in item["known"]
        if one["id"] in known["requirements"]
    ]
    deviates = _table(("Implementation", "Kind", "Reason"), known) if known else "Nobody deviates."
    return (
        f"# {one['id']}\n\n**{_text(one['level'])}**: {_text(one['sentence'])}\n\n"
        f"{_text(one['why'])}\n\n## Who deviates from {one['id']}\n\n{deviates}\n\n"
        f"## Findings of {one['id']}\n\n{_table(('Implementation', 'Findings'), rows)}\n"
    )


def _defects(site: Site) -> Iterator[Defect]:
    """Yield each defect once: a name for its page, its longest reason, and who has it."""
    groups: dict[str, list[tuple[Item, Item]]] = {}
    for one in _everybody(site):
        for known in one["known"]:
            if known["kind"] == "defect":
                groups.setdefault(_key(known), []).append((one, known))
    for key, found in groups.items():
        name = _slug(Path(key).stem if key.endswith(".py") else " ".join(key.split()[:9]))
        yield name, max((known for _, known in found), key=lambda it: len(it["reason"])), found


class Reproduction(NamedTuple):
    """What a script in docs/reproductions says of a defect.

    Attributes:
        title: for a stranger, what goes wrong where.
        happens: the comment at its head, without the next two.
        found: the sentences of the comment on versions.
        instead: a way around; "" if none is known.
        code: the program below the comment.
        error: what it prints or raises at its end, as far as the program says it.
    """

    title: str
    happens: str
    found: str
    instead: str
    code: str
    error: str


def _key(known: Item) -> str:
    """Return what tells a defect from others: its script or, without one, its reason."""
    return known["script"] or known["reason"]


def _reproduction(root: Path, known: Item) -> Reproduction:
    """Return what the script of a defect says: its comment, its code, and how it ends.

    Of a defect without a script, only the reason in the baseline is known.
    """
    script, reason = known["script"], known["reason"]
    if not script:
        return Reproduction(textwrap.shorten(reason, 110, placeholder=" …"), reason, "", "", "", "")
    text = (root / script).read_text(encoding="utf-8")
    lines = text.splitlines()
    head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    comment = " ".join(line.removeprefix("#").strip() for line in head)
    code = "\n".join(lines[len(head) :]).strip()
    words = tomllib.loads((root / DEFECTS).read_text(encoding="utf-8")).get(Path(script).stem, {})
    sentences = re.split(r"(?<=[.)])\s+(?=[A-Z])", comment)
    found = [one for one in sentences if re.match(r"(Found with|Since) ", one)]
    happens = " ".join(one for one in sentences if one not in found)
    return Reproduction(
        title=words.get("title") or textwrap.shorten(sentences[0], 110, placeholder=" …"),
        happens=happens,
        found=" ".join(found),
        instead=words.get("instead", ""),
        code=code,
        error=_error(code),
    )


def _error(code: str) -> str:
    """Return how a script ends where the defect is there, as its last assertion says it."""
    asserted = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Assert)]
    told = asserted[-1].msg if asserted else None
    return f"AssertionError: {told.value}" if isinstance(told, ast.Constant) else ""


def _by_library(
    defects: Iterable[Defect], shown: Mapping[str, Reproduction]
) -> dict[str, list[tuple[str, str]]]:
    """Return the name and title of each defect's page, by the library that it begins with."""
    libraries: dict[str, list[tuple[str, str]]] = {}
    for name, one, _ in defects:
        title = shown[_key(one)].title
        library = re.split(r"[ .:,]", title)[0]
        libraries.setdefault(library, []).append((name, title))
    return {
        library: sorted(libraries[library], key=lambda own: own[1])
        for library in sorted(libraries, key=str.lower)
    }


def navigation(root: Path) -> list[Any]:
    """Return the pages of defects as a part of a navigation, by library."""
    defects = list(_defects(read(root)))
    shown = {_key(one): _reproduction(root, one) for _, one, _ in defects}
    return [
        "defects/all.md",
        *(
            {library: [{title: f"defects/{name}.md"} for name, title in own]}
            for library, own in _by_library(defects, shown).items()
        ),
    ]


def _all_defects(defects: Iterable[Defect], shown: Mapping[str, Reproduction]) -> str:
    """Return the list of all defects, by library."""
    others = ", ".join(_link(title.lower(), f"../known/{kind}.md") for kind, title in KINDS.items())
    lines = [
        "# All defects",
        "What goes wrong in a library, with a program of a few lines that shows it without this "
        f"suite, a way around, and where it is discussed. What else is known to deviate: {others}.",
    ]
    for library, own in _by_library(defects, shown).items():
        links = (f"- {_link(title, f'{name}.md')}" for name, title in own)
        lines += [f"## {_text(library)}", "\n".join(links)]
    return "\n\n".join(lines) + "\n"


def _defect(shown: Reproduction, one: Item, found: Sequence[tuple[Item, Item]]) -> str:
    links = dict.fromkeys(known["link"] for _, known in found if known["link"].startswith("https:"))
    lines = [f"# {_text(shown.title)}", "## What happens", _text(shown.happens)]
    if shown.instead:
        lines += ["## A way around", _text(shown.instead)]
    if shown.code:
        lines += [
            "## A program that shows it",
            f"It needs the library only, and not this suite: [{_text(one['script'])}]"
            f"(../../{one['script']}).",
            f"~~~~~~ python\n{shown.code}\n~~~~~~",
        ]
    if shown.error:
        lines += ["Where the defect is there, it ends with:", f"~~~~~~ text\n{shown.error}\n~~~~~~"]
    groups: dict[tuple[str, str, str], tuple[list[str], list[str]]] = {}
    for item, known in found:
        place = (_implementation(item), _having(item, known), known["when"])
        dtypes, requirements = groups.setdefault(place, ([], []))
        dtypes += known["dtypes"]
        requirements += known["requirements"]
    rows = [
        (
            implementation,
            _text(versions),
            ", ".join(dict.fromkeys(dtypes)),
            _text(when) or "·",
            ", ".join(_link(it, f"../requirements/{it}.md") for it in dict.fromkeys(requirements)),
        )
        for (implementation, versions, when), (dtypes, requirements) in groups.items()
    ]
    columns = ("Implementation", "Versions", "Dtypes", "Holds where", "Requirements")
    kept = [at for at in range(len(columns)) if at != 3 or any(row[3] != "·" for row in rows)]
    table = _table([columns[at] for at in kept], [[row[at] for at in kept] for row in rows])
    lines += ["## Who has it, and in which versions", table]
    if shown.found:
        lines.append(_text(shown.found))
    upstream = "\n".join(f"- <{link}>" for link in links) or "No discussion is known."
    lines += ["## Upstream", upstream, "[All defects](all.md)"]
    return "\n\n".join(lines) + "\n"


def _can_i_use(site: Site) -> str:
    short = [name for name in site["questions"] if name in _questions(site)][:1]
    few = [*short, "0 and −inf", "A fully masked query gets", CAUSAL, "Window"]
    few = [name for name in few if name in _questions(site)]
    is_on_gpu = any(one["gpu"] for one in site["implementations"])
    rows = [
        (_implementation(one, "implementations/"),
         *map(_switched, _glance(one, few, "cpu"), _glance(one, few, "gpu")))
        if is_on_gpu else (_implementation(one, "implementations/"), *_glance(one, few, "cpu"))
        for one in site["implementations"]
    ]  # fmt: skip
    asked = {name: [ASKED[name], f"conventions/{_slug(name)}.html"] for name in _questions(site)}
    ones = [
        one
        | {
            "courses": {name: _course(one, name) for name in one["answers"]},
            "alone": _alone(one),
        }
        for one in site["implementations"]
    ]
    given = {"features": site["features"], "implementations": ones, "asked": asked}
    table = _table(("Implementation", *map(_text, few), "Deviates"), rows)
    measured = "" if is_on_gpu else " On CPUs: nothing was measured on a GPU."
    return (
        "---\nhide: [toc]\n---\n\n# Can I use\n\nChoose an implementation and a question; "
        f"the answer is what experiments showed, with what deviates.{measured}\n\n"
        '<form id="can-i-use-form" class="answers-form" hidden></form>\n\n'
        '<div id="can-i-use-answer" class="answers-result" aria-live="polite"></div>\n\n'
        f"## Everybody at a glance\n\n{table}\n\n{_data('site-data', given)}\n"
    )


def _glance(one: Item, few: Sequence[str], device: str) -> list[str]:
    """Return the cells of a row about one device: answers, and what deviates."""
    own = one if one["device"] == device else one["gpu"] if device == "gpu" else None
    if own is None:
        return [*("–" for _ in few), f"not measured on a {device.upper()}"]
    answers = (_values(own["answers"].get(name, ())) or "·" for name in few)
    return [*answers, _text(own.get("unavailable") or _standing(own)[0])]


def _switched(cpu: str, gpu: str) -> str:
    """Return a cell of which the page shows one half: what the chosen device did."""
    if cpu == gpu:
        return cpu
    return f'<span class="on-cpu">{cpu}</span><span class="on-gpu" hidden>{gpu}</span>'


def _translator(site: Site) -> str:
    names = {one["key"]: one["title"] for one in site["implementations"]}
    told = site["translator"]
    rows = [
        (_text(names.get(key, key)), f"`{name}`", _text(", ".join(told["kinds"][kind][0])),
         *(_text(told["kinds"][kind][at] or "·") for at in (1, 2)))
        for key, name, kind in told.get("arguments", ())
    ]  # fmt: skip
    return (
        "# Translator of masks\n\nChoose a mask, the argument that you have it for, and the "
        "argument that needs it. The answers are those of [`translate`](porting.md), computed "
        "beforehand for a batch of 2, 2 heads, and 5 tokens.\n\n"
        '<form id="translator-form" class="answers-form" hidden></form>\n\n'
        '<div id="translator-answer" class="answers-result" aria-live="polite"></div>\n\n'
        "## What each argument means\n\n"
        f"{_table(('Implementation', 'Argument', 'Axes', 'True', 'A number'), rows)}\n\n"
        f"{_data('translator-data', told | {'names': names})}\n"
    )


def _badges(site: Site) -> str:
    rows = [
        (_implementation(one, "../implementations/"),
         f"![{_text(one['key'])}: {_text(_standing(one)[0])}]({one['key']}.svg)<br>"
         f"`badges/{one['key']}.svg`")
        for one in site["implementations"]
    ]  # fmt: skip
    return (
        "# Badges\n\nA badge names the kinds of deviations that are known of an implementation. "
        "Embed it with the address of this site:\n\n"
        "```text\n[![attention](SITE/badges/torch-mha.svg)](SITE/implementations/torch-mha.html)\n```\n\n"
        f"{_table(('Implementation', 'Badge and file'), rows)}\n"
    )


def badge(text: str, color: str) -> str:
    """Return a badge as SVG."""
    left, right = 62, 12 + 6.3 * len(text)
    said = html.escape(text)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right:.0f}" height="20" '
        f'role="img" aria-label="attention: {said}"><title>attention: {said}</title>'
        f'<rect width="{left}" height="20" fill="#3c4654"/>'
        f'<rect x="{left}" width="{right:.0f}" height="20" fill="{color}"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="6" y="14">attention</text><text x="{left + 6}" y="14">{said}</text></g></svg>\n'
    )


def _standing(one: Item) -> tuple[str, str]:
    kinds: dict[str, set[str]] = {}
    for known in one["known"]:
        kinds.setdefault(known["kind"], set()).add(known["script"] or known["reason"])
    text = ", ".join(f"{len(of)} × {kind}" if len(of) > 1 else kind for kind, of in kinds.items())
    return text or "conforms", "#a3352a" if "defect" in kinds else "#7a5a00" if kinds else "#1f6f3d"


# Text


def _title(name: str) -> str:
    return name.replace("… and gradients", "Gradients of a fully masked query")


def _slug(text: str) -> str:
    text = _title(text).lower().replace("−", "minus ")
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def _text(text: str) -> str:
    escaped = html.escape(" ".join(str(text).split()), quote=False)
    return SPECIAL.sub(lambda found: f"&#{ord(found[0])};", escaped)


def _link(text: str, to: str) -> str:
    return f"[{_text(text)}]({to})"


def _implementation(one: Item, folder: str = "../implementations/") -> str:
    # A long name breaks where it is read as words.
    title = re.sub(r"(?<=\w)(\.|&#95;)(?=\w)", r"\1<wbr>", _text(one["title"]))
    return f"[{title}]({folder}{one['key']}.md)"


def _libraries(found: Iterable[tuple[Item, Item]]) -> str:
    return ", ".join(dict.fromkeys(one["library"] for one, _ in found))


def _versions(one: Item) -> str:
    return ", ".join(f"{name} {version}" for name, version in one["versions"].items())


def _wrong(cell: Mapping[str, int]) -> int:
    return sum(cell.get(verdict, 0) for verdict in ("deviates", "error", "crashed", "timed-out"))


def _values(values: Iterable[Sequence[Any]]) -> str:
    return "<br>".join(
        f"{'**' if alarming else ''}{_text(value)}{'**' if alarming else ''}"
        f"{f' ({_text(where)})' if where else ''}"
        for value, where, alarming in values
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [heads, [":--"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _list(title: str, about: str, links: Iterable[tuple[str, str]]) -> str:
    items = "\n".join(f"- {_link(_title(text), to)}" for to, text in links)
    return f"# {title}\n\n{about}\n\n{items}\n"


def _data(name: str, data: Any) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<script type="application/json" id="{name}">{text}</script>\n\n'
        '<script src="site/answers.js"></script>'
    )
