"""A few shapes for the documentation's pictures, as SVG text that looks the same on a light and on a dark page."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

INK, FAINT, PAPER = "#1f2933", "#9aa5b1", "#ffffff"
ENGINE, TRAINER, FROZEN, HOST = "#f2a65a", "#5b8def", "#7fb77e", "#cbd2d9"
"""Colours: what belongs to the rollout engine, what is trained, what is frozen, what lies in host memory or on disk."""


def text(x: float, y: float, words: str, *, size: int = 14, anchor: str = "middle", weight: str = "normal") -> str:
    """Return one line of text whose baseline is at y."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{INK}">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, lines: Sequence[str], *, fill: str = PAPER) -> str:
    """Return a box with lines of text in its middle, the first one bold."""
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    words = "".join(
        text(x + width / 2, first + 18 * i, line, weight="normal" if i else "bold", size=13 if i else 14)
        for i, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" '
        f'fill-opacity="0.45" stroke="{INK}"/>' + words
    )


def arrow(*points: tuple[float, float], label: str = "", dashed: bool = False) -> str:
    """Return a line through the points with a head at its end; the label stands above its first part."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    line = f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5"{dash} marker-end="url(#head)"/>'
    if not label:
        return line
    (x0, y0), (x1, y1) = points[:2]
    return line + text((x0 + x1) / 2, (y0 + y1) / 2 - 7, label, size=12)


def picture(width: float, height: float, title: str, shapes: Sequence[str]) -> str:
    """Return the whole SVG file; the title is what a screen reader says."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif" role="img">\n'
        f"<title>{escape(title)}</title>\n<defs>{head}</defs>\n"
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{PAPER}"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )
