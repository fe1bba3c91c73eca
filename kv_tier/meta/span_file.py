"""Span files: the names that the rest of the store uses."""

from kv_tier.meta.span_reader import SpanFile, SpanTables
from kv_tier.meta.span_scan import BadSpan, quarantine_span, scan_spans, supersedes
from kv_tier.meta.span_writer import SpanParts, write_span, write_unlinked_span

__all__ = [
    "BadSpan",
    "SpanFile",
    "SpanParts",
    "SpanTables",
    "quarantine_span",
    "scan_spans",
    "supersedes",
    "write_span",
    "write_unlinked_span",
]
