"""A table for the terminal, Markdown, HTML and LaTeX."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.table
    from markupsafe import Markup

# Characters that Markdown reads as markup; `*` and `_` between letters, as in no_change, are text.
_MARKUP_PATTERN = re.compile(r"[\\`<>\[\]|~]|&(?=#?\w+;)|(?<![^\W_])[*_]|[*_](?![^\W_])")
_LATEX_CODES = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "±": r"$\pm$",
        "†": r"$\dagger$",
    }
)


def escape_markdown(text: str) -> str:
    r"""Return text of a user (names, remarks, captions) so that Markdown shows it as it is, in one line.

    Example:
        >>> print(escape_markdown("<b>no_change</b> | *x*"))
        \<b\>no_change\</b\> \| \*x\*
    """
    return _MARKUP_PATTERN.sub(r"\\\g<0>", " ".join(text.split()))


@dataclass(frozen=True)
class Cell:
    """A number as text; `text` is "" if the number is missing."""

    text: str
    std: str = ""  # standard deviation over runs, in the same unit
    fraction: float = 0.0  # in HTML, the length of the number's bar or the strength of its shade, from 0 to 1
    best: bool = False  # whether the number is the best of its column
    tick: float | None = None  # in HTML, the value of chance, from 0 to 1: a tick on the bar, and a number in percent

    def with_std(self, separator: str) -> str:
        """Return the number, `separator` and the standard deviation as one text. A missing number is "-"."""
        return (self.text or "-") + (f"{separator}{self.std}" if self.std else "")


@dataclass(frozen=True)
class Table:
    """A table. Each line has first texts, such as a name, and then numbers."""

    columns: Sequence[str]  # headings of the numbers
    rows: Sequence[tuple[Sequence[str], Sequence[Cell]]]  # texts and numbers of each line
    corner: Sequence[str] = ("",)  # headings of the texts, in the upper left corner
    title: str = ""
    note: str = ""  # below the table in the terminal

    def lines(self, separator: str = " ± ") -> list[list[str]]:
        """Return the headings, then the lines, as text. `separator` is between a number and its standard deviation."""
        body = [[*texts, *(cell.with_std(separator) for cell in cells)] for texts, cells in self.rows]
        return [[*self.corner, *self.columns], *body]

    def rich(self) -> "rich.table.Table":
        """Return the table for the terminal: headings break at spaces, and a standard deviation is below its number."""
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(
            title=self.title or None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
            caption=self.note or None,
            caption_justify="left",
        )
        for heading in self.corner:
            table.add_column(heading)
        for heading in self.columns:
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
        for line in self.lines("\n± ")[1:]:
            table.add_row(*line)
        return table

    def markdown(self) -> str:
        """Return Markdown without a final line break. Texts, which users choose, are escaped."""
        header, *body = self.lines()
        num_texts = len(self.corner)
        shown = [list(map(escape_markdown, header)), ["---"] * num_texts + ["---:"] * len(self.columns)]
        shown += [[*map(escape_markdown, line[:num_texts]), *line[num_texts:]] for line in body]
        return "\n".join(f"| {' | '.join(line)} |" for line in shown)

    def html(self, kind: str, colors: Mapping[str, str], muted: Collection[str] = ()) -> "Markup":
        """Return HTML for the style sheet of the report, `page.css`. The table is in a box that scrolls. All texts are escaped.

        Args:
            kind: CSS class: "bars" (a bar below each number), "heat" (a shade behind each number), "where" (bars with ticks).
            colors: first text of a line -> CSS colour of its bars and of a dot before it. Other lines have no dot, and their bars have
                the colour `--c` of an element around the table.
            muted: first texts of the lines that are shown in gray.
        """
        import jinja2  # only the report needs it
        from markupsafe import Markup

        source = files("diffcap.utils").joinpath("table.html.j2").read_text(encoding="utf-8")
        template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
        return Markup(template.render(table=self, kind=kind, colors=colors, muted=muted))

    def latex(self) -> str:
        """Return a tabular environment for LaTeX's package booktabs, without a final line break. The best numbers are bold."""

        def number(cell: Cell) -> str:
            text = cell.with_std(" ± ").translate(_LATEX_CODES)
            return rf"\textbf{{{text}}}" if cell.best else text

        headings = [text.translate(_LATEX_CODES) for text in (*self.corner, *self.columns)]
        body = [[*(text.translate(_LATEX_CODES) for text in texts), *map(number, cells)] for texts, cells in self.rows]
        header, *lines = [rf"{' & '.join(line)} \\" for line in (headings, *body)]
        columns = "l" * len(self.corner) + "r" * len(self.columns)
        begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
        return "\n".join([begin, r"\toprule", header, r"\midrule", *lines, r"\bottomrule", end])
