"""What a browser or a screen reader makes of a page."""

from html.parser import HTMLParser

_EMPTY = frozenset({"meta", "link", "input", "br", "img", "rect", "line", "polyline", "polygon", "circle"})
_HEADINGS = ("h1", "h2", "h3")


class Parsed(HTMLParser):
    """Elements with the names of their attributes, texts, and what assistive programs go by."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.texts: list[str] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.labels: set[str] = set()
        self.fields: list[dict[str, str]] = []
        self.named: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.elements.append((tag, tuple(values)))
        if tag in _HEADINGS:
            self.headings.append(int(tag[1]))
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "label":
            self.labels.add(values.get("for", ""))
        if tag in ("input", "select"):
            self.fields.append(values)
        self.named += values.get("aria-labelledby", "").split() + values.get("aria-describedby", "").split()
        if "href" in values:
            self.links.append(values["href"])
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _EMPTY:
            assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def cells_after(self, label: str, count: int) -> list[str]:
        """The texts that follow a text."""
        texts = [text for text in self.texts if text]
        start = texts.index(label) + 1
        return texts[start : start + count]


def faults_of(html: str) -> list[str]:
    """What a person without eyes or mouse would miss."""
    page, found = Parsed(html), []
    if page.headings.count(1) != 1 or page.headings[0] != 1:
        found.append(f"headings {page.headings}")
    found += [
        f"h{after} after h{before}"
        for before, after in zip(page.headings, page.headings[1:], strict=False)
        if after > before + 1
    ]
    for landmark in ("header", "main", "footer", "nav"):
        if not any(tag == landmark for tag, _ in page.elements):
            found.append(f"no {landmark}")
    found += [f"two of id {name}" for name in set(page.ids) if page.ids.count(name) > 1]
    found += [f"no element {name}" for name in page.named if name not in page.ids]
    for field in page.fields:
        if not (field.get("id") in page.labels or "aria-label" in field):
            found.append(f"no label for {field}")
    heads = [attributes for tag, attributes in page.elements if tag == "th"]
    found += ["th without scope" for attributes in heads if "scope" not in attributes]
    found += [f"not closed: {page.open}"] if page.open else []
    if not any(link == "#main" for link in page.links):
        found.append("no way past the bar")
    return found
