"""`python -m benchmarks.elastic`: the study as a Markdown table, in about a minute."""

from __future__ import annotations

from benchmarks.elastic.study import markdown, study

if __name__ == "__main__":
    print(markdown(study()))
