"""report.html: what was measured, as one page that opens anywhere."""

from genmodels.report.compare import render, write_page

__all__ = ["render", "write_page"]
