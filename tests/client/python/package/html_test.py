"""The page of selected tokens, parsed, of a real selection. Usage: html_test.py BUILD"""

import html.parser
import pathlib
import tempfile
import unittest

import numpy as np

from daemon import KV_HEADS, DaemonTest, Layer, pqcached
from pqcached import html as pages

VOID = {"meta", "br"}


class Page(html.parser.HTMLParser):
    """Texts by layer and head, marks [(kind, position, text)], and all that refers to something."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.texts, self.marks, self.links, self.tags, self.titles = [], {}, {}, [], set(), []
        self._place = self._mark = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        self.links += [value for name, value in attributes.items() if name in ("href", "src", "action")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "details":
            self._place = attributes["id"]
            self.texts[self._place], self.marks[self._place] = "", []
        if tag == "span":
            self._mark = attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.open)
        if tag == "span":
            self._mark = None

    def handle_data(self, data):
        if "pre" in self.open:
            self.texts[self._place] += data
            if self._mark:
                self.marks[self._place].append((self._mark["class"], int(self._mark["title"]), data))
        elif self.open[-1:] == ["title"]:
            self.titles.append(data)


class HtmlTest(DaemonTest):
    def test_every_token_is_marked_as_it_was_selected(self):
        page = Page(pages.page_of_selected(["a ", "b ", "c ", "d ", "e ", "f"], {(3, 1): np.array([1, 2], np.uint32), (0, 0): [5]},
                                           {(3, 1): [2, 3, 0], (0, 0): [5]}, always=(0, 5)))
        self.assertEqual(list(page.texts), ["l0h0", "l3h1"])
        self.assertEqual(set(page.texts.values()), {"a b c d e f"})
        self.assertEqual(page.marks["l3h1"], [("always", 0, "a "), ("extra", 1, "b "), ("found", 2, "c "),
                                              ("missed", 3, "d "), ("always", 5, "f")])
        self.assertEqual(page.marks["l0h0"], [("always", 0, "a "), ("found", 5, "f")])

    def test_texts_are_escaped_and_nothing_is_loaded(self):
        texts = ["</pre><script>alert(1)</script>", "&amp;", '"\'', "<b", "ü\n", "\ud800"]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "page.html")
            pages.write_selected(path, texts, {(0, 0): [0, 3]}, {(0, 0): [0, 1]}, title="<i>T</i> & co")
            page = Page(path.read_text(encoding="utf-8"))
        self.assertEqual(page.open, [])
        self.assertEqual(page.texts["l0h0"], "".join(texts[:-1]) + "?")
        self.assertEqual(page.titles, ["<i>T</i> & co"])
        self.assertEqual(page.links, ["#l0h0"])
        self.assertFalse(page.tags & {"script", "link", "img", "i", "b", "iframe"})
        self.assertNotIn("url(", pages.page_of_selected([], {}, {}))

    def test_wrong_positions_are_refused_by_name(self):
        for selected, exact, error, part in (
                ({(0, 1): [2]}, {(0, 1): [0]}, pqcached.InvalidArgument, "selected[0, 1]: 2, must be 0 to 1"),
                ({(0, 1): [1]}, {(0, 1): [-1]}, pqcached.InvalidArgument, "exact[0, 1]: -1"),
                ({(0, 1): [1]}, {(0, 2): [1]}, pqcached.InvalidArgument, "differs in [(0, 1), (0, 2)]"),
                ({(0, 1): [1.5]}, {(0, 1): [1]}, TypeError, "selected[0, 1]: dtype float64")):
            with self.fails(error, part):
                pages.page_of_selected(["a", "b"], selected, exact)

    def test_a_selection_of_the_sidecar(self):
        layer, tokens = Layer(300), 300
        sequence = self.sequence()
        sequence.ingest(0, 0, layer.keys, layer.values)
        sequence.build_index(pqcached.Index.pq(2, 4), sink_tokens=4)
        found, best = (sequence.topk(0, tokens - 1, layer.queries, pqcached.Selection(
            token_count=30, sink_tokens=4, window_tokens=16, index=index)).positions
            for index in (pqcached.Index.pq(2, 4), pqcached.Index.flat()))
        page = Page(pages.page_of_selected([f"token {i} " for i in range(tokens)], {(0, head): found[head] for head in range(KV_HEADS)},
                                           {(0, head): best[head] for head in range(KV_HEADS)}))
        for head in range(KV_HEADS):
            marks = page.marks[f"l0h{head}"]
            by_kind = {kind: {position for one, position, _ in marks if one == kind} for kind in ("found", "missed", "extra")}
            self.assertEqual(by_kind["found"], set(found[head]) & set(best[head]))
            self.assertEqual(by_kind["missed"], set(best[head]) - set(found[head]))
            self.assertEqual(by_kind["extra"], set(found[head]) - set(best[head]))
            self.assertTrue(by_kind["missed"])
            self.assertTrue(all(text == f"token {position} " for _, position, text in marks))


if __name__ == "__main__":
    unittest.main()
