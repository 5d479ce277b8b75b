"""Look of the report: one style sheet, light and dark by the reader's setting, and small HTML builders.

Every colour is a CSS variable. Pictures use the same variables, so that they follow the theme too.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

# Series colours, readable on both grounds; the order is fixed, so a model keeps its colour in all pictures.
NUM_SERIES = 8

_WRAP = " wrap"

CSS = """
:root{color-scheme:light dark;--ground:#f7f8fa;--card:#fff;--ink:#1b2330;--soft:#5b6675;--line:#dfe3ea;
--grid:#e6e9ef;--accent:#2457c5;--good:#1a7f45;--good-bg:#e5f5ec;--bad:#b3341f;--bad-bg:#fdebe7;--warn:#8a5a00;
--warn-bg:#fdf3dc;--code:#eef1f6;--s0:#2457c5;--s1:#d9600f;--s2:#1a8f5a;--s3:#8d45c2;--s4:#c22f64;--s5:#0b8a9c;
--s6:#8a7400;--s7:#6b7280}
@media (prefers-color-scheme:dark){:root{--ground:#12161d;--card:#1a202a;--ink:#e8ecf2;--soft:#9aa6b6;
--line:#2e3744;--grid:#2a323e;--accent:#7ea6ff;--good:#5fd394;--good-bg:#15301f;--bad:#ff8d78;--bad-bg:#3a1c17;
--warn:#f2c25b;--warn-bg:#352a12;--code:#232b37;--s0:#7ea6ff;--s1:#ff9d5c;--s2:#57cf97;--s3:#c895f5;--s4:#ff7fa8;
--s5:#4fc9da;--s6:#d9c24a;--s7:#a3adbb}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"DejaVu Sans",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1180px;margin:0 auto;padding:28px 20px 56px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:38px 0 12px}
h3{font-size:14px;margin:0 0 8px;font-weight:600}
p{margin:6px 0}
a{color:var(--accent)}
.sub,.note{color:var(--soft);font-size:13px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 18px;margin:0 0 14px}
.verdict{border-left:5px solid var(--good);overflow-wrap:anywhere}.verdict.bad{border-left-color:var(--bad)}
.verdict.mixed{border-left-color:var(--warn)}
.verdict .lead{font-size:17px;font-weight:600;margin:0 0 6px}
.verdict ul{margin:8px 0 0;padding:0;list-style:none}
.verdict li{padding:7px 0;border-top:1px solid var(--line)}
.verdict li ul{margin:2px 0 0;padding-left:18px;list-style:disc}.verdict li li{border:0;padding:1px 0;color:var(--soft)}
.verdict .why{color:var(--soft);font-size:13.5px}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:14px 0}
.fact{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:11px 14px}
.fact b{display:block;font-size:21px;line-height:1.25;font-variant-numeric:tabular-nums}
.fact span{color:var(--soft);font-size:12.5px}
.badge{display:inline-block;border-radius:99px;padding:1px 9px;font-size:12px;font-weight:600;white-space:nowrap}
.badge.good{background:var(--good-bg);color:var(--good)}.badge.bad{background:var(--bad-bg);color:var(--bad)}
.badge.warn{background:var(--warn-bg);color:var(--warn)}.badge.plain{background:var(--code);color:var(--soft)}
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600;font-size:12.5px;white-space:nowrap}
td{white-space:nowrap}
td.l{white-space:normal}td.wrap{overflow-wrap:anywhere;min-width:170px;max-width:280px}
th.l,td.l{text-align:left}
tr:last-child td{border-bottom:0}
tr.first td{border-top:1px solid var(--line)}
.ci{color:var(--soft);font-size:12px}
td .why{color:var(--soft);font-size:12px;white-space:normal;display:inline-block;max-width:150px;text-align:right}
.pics{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px;align-items:start}
.pics .card{margin:0}
figure{margin:0}figcaption{color:var(--soft);font-size:12.5px;margin-top:6px}
figure svg{display:block;width:100%;height:auto}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12.5px}
code{background:var(--code);padding:1px 5px;border-radius:4px;overflow-wrap:anywhere}
pre{background:var(--code);padding:12px 14px;border-radius:8px;overflow-x:auto;margin:0}
details{border-top:1px solid var(--line);padding:8px 0}details:first-of-type{border-top:0}
summary{cursor:pointer;font-weight:600}
dl{margin:0}dt{font-weight:600;margin-top:10px}dd{margin:2px 0 0}
.wide{display:block}.narrow{display:none}
@media (max-width:700px){main{padding:18px 12px 40px}h1{font-size:22px}.card{padding:13px 13px}
.wide{display:none}.narrow{display:block}.facts{grid-template-columns:repeat(2,minmax(0,1fr))}.fact b{font-size:18px}
th,td{padding:6px 7px}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""


def esc(value: object) -> str:
    """Any value as text that is safe inside an element or a quoted attribute."""
    return html.escape(str(value), quote=True)


def badge(text: str, kind: str) -> str:
    """A small coloured label; `kind` is good, bad, warn or plain."""
    return f'<span class="badge {kind}">{esc(text)}</span>'


def card(body: str, extra: str = "") -> str:
    """A framed block; `body` is HTML."""
    return f'<div class="card {extra}">{body}</div>'


def section(title: str, body: str) -> str:
    """A heading and what stands under it; nothing at all if `body` is empty."""
    return f"<section><h2>{esc(title)}</h2>{body}</section>" if body else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table that scrolls sideways on a narrow screen. Header: plain text; cells: HTML already escaped.

    left: the columns whose text stands to the left and wraps between words, in very long words anywhere.
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="l{_WRAP if _longest_word(cell) > 24 else ""}">{cell}</{tag}>'
            if i in left
            else f"<{tag}>{cell}</{tag}>"
            for i, cell in enumerate(row)
        )

    head = cells("th", [esc(name) for name in header])
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _longest_word(cell: str) -> int:
    return max((len(word) for word in re.sub(r"<[^>]*>", "", cell).split()), default=0)


def figure(title: str, svg: str, caption: str) -> str:
    """A picture in a card; `svg` is HTML, title and caption plain text."""
    head = f"<h3>{esc(title)}</h3>"
    return card(f"<figure>{head}{svg}<figcaption>{esc(caption)}</figcaption></figure>") if svg else ""
