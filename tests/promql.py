# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Finds which labels the answer to a Prometheus query has, for the tests of the dashboards.

A dashboard panel stays empty if it uses a label that the answer does not have. This module reads
the part of PromQL that our dashboards use. It fails if a query names a metric or a label that
nothing exports.
"""

from __future__ import annotations

import re
from itertools import chain

#: Labels that Prometheus itself gives each series of a target.
TARGET = {"instance", "job"}

_TOKENS = re.compile(
    r'\s*(?:(?P<word>[A-Za-z_]\w*)|(?P<number>[\d.]+)|(?P<text>"[^"]*")'
    r"|(?P<sign>=~|!=|!~|[-{}()\[\],=*/+]|\$\w+))"
)


def exported(registry):
    """Return the labels of all samples of a registry, as a dict: name of the sample -> labels."""
    found = {}
    for family in registry.collect():
        ends = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
        ends = {**ends, "info": ("_info",)}.get(family.type, ("",))
        for end in ends:
            labels = (s.labels for s in family.samples if s.name == family.name + end)
            found[family.name + end] = TARGET | {*chain.from_iterable(labels)}
    # A counter has no samples before its first count, but the registry knows its labels.
    for metric in registry._collector_to_names:
        for name in registry._collector_to_names[metric]:
            if name in found:
                found[name] |= {*getattr(metric, "_labelnames", ())}
    return found


def labels_of(query, known):
    """Return the labels of a query's answer; ``known`` is the result of :func:`exported`."""
    parser = _Parser(query, known)
    found = parser.sum()
    assert parser.peek() is None, f"{query}: {parser.peek()!r} is not understood"
    return found


class _Parser:
    def __init__(self, query, known):
        self.query, self.known, self.tokens, at = query, known, [], 0
        while query[at:].strip():
            match = _TOKENS.match(query, at)
            assert match, f"{query}: {query[at:]!r} is not understood"
            self.tokens.append(match[0].strip())
            at = match.end()

    def peek(self):
        return self.tokens[0] if self.tokens else None

    def take(self, *wanted):
        token = self.tokens.pop(0)
        assert not wanted or token in wanted, f"{self.query}: {token!r} in place of {wanted}"
        return token

    def names(self):
        """Read a list of labels in parentheses."""
        self.take("(")
        found = set()
        while self.peek() != ")":
            found.add(self.take())
            if self.peek() == ",":
                self.take()
        self.take(")")
        return found

    def sum(self):
        """Read a sum or product; return the labels of its result, or None if this is a number."""
        left = self.operand()
        while self.peek() in ("*", "/", "+", "-"):
            self.take()
            on, more = None, set()
            if self.peek() == "on":
                self.take()
                on = self.names()
                if self.peek() == "group_left":
                    self.take()
                    more = self.names()
            right = self.operand()
            if left is None or right is None:
                left = right if left is None else left
            elif on is None:
                assert left == right, f"{self.query}: {left} never matches {right}"
            else:
                assert on <= left & right, f"{self.query}: on {on - (left & right)}"
                assert more <= right, f"{self.query}: group_left {more - right}"
                left = left | more
        return left

    def operand(self):
        token = self.take()
        if token == "(":
            found = self.sum()
            self.take(")")
            return found
        if re.fullmatch(r"[\d.]+", token):
            return None
        if token in ("sum", "max", "avg", "count"):
            by = set()
            if self.peek() == "by":
                self.take()
                by = self.names()
            self.take("(")
            found = self.sum()
            self.take(")")
            assert by <= found, f"{self.query}: by {by - found}"
            return by
        if token == "histogram_quantile":
            self.take("(")
            self.operand()
            self.take(",")
            found = self.sum()
            self.take(")")
            assert "le" in found, f"{self.query}: a quantile needs the label le"
            return found - {"le"}
        if token in ("rate", "increase"):
            self.take("(")
            found = self.metric(self.take())
            for wanted in ("[", "$__rate_interval", "]", ")"):
                self.take(wanted)
            return found
        assert not self.known.get(token, set()) or not token.endswith(("_total", "_bucket")), (
            f"{self.query}: a counter is no figure without a rate"
        )
        return self.metric(token)

    def metric(self, name):
        assert name in self.known, f"{self.query}: nothing exports {name}"
        labels = self.known[name]
        if self.peek() == "{":
            self.take()
            while self.peek() != "}":
                label = self.take()
                assert label in labels, f"{self.query}: {name} has no label {label}"
                self.take("=", "=~", "!=", "!~")
                self.take()
                if self.peek() == ",":
                    self.take()
            self.take("}")
        return labels


def check(board, known):
    """Check each query of a dashboard, and that its legend uses only labels of the answer.

    Returns
    -------
    set
        The names of the samples that the dashboard shows.
    """
    queries = [
        (t["expr"], t.get("legendFormat", "")) for p in board["panels"] for t in p["targets"]
    ]
    for query, legend in queries:
        missing = {*re.findall(r"{{(\w+)}}", legend)} - (labels_of(query, known) or set())
        assert not missing, f"{query}: the legend names {missing}"
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["query"]["query"]
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
            assert label in known[name], query
            queries.append((query, ""))
    return {*re.findall(r"jupyter_gpupool_\w+", " ".join(query for query, _ in queries))}
