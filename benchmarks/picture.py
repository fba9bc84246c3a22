"""The frame that the benchmarks' pictures share: an SVG document with a title, in light and dark as the reader's browser is."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape


def framed(title: str, width: int, height: int, parts: Iterable[str], light: str = "", dark: str = "") -> str:
    """The parts on paper, with their own styles for light and what is other in dark."""
    opening = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{LIGHT} {light} @media (prefers-color-scheme: dark) {{ {DARK} {dark} }}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="ink big" x="8" y="20">{escape(title)}</text>',
    ]
    return "\n".join([*opening, *parts, "</svg>", ""])


LIGHT = (
    "text { font: 11px ui-sans-serif, system-ui, sans-serif; } .big { font-size: 13px; font-weight: 600; } "
    ".paper { fill: #ffffff; } .ink { fill: #1f2328; } .faint { fill: #59636e; } .line { stroke: #d1d9e0; } "
    ".halo { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }"
)
DARK = (
    ".paper { fill: #0d1117; } .ink { fill: #e6edf3; } .faint { fill: #9198a1; } .line { stroke: #30363d; } "
    ".halo { stroke: #0d1117; }"
)
