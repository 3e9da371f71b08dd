"""Ready jobs over RoQ's formats, one module each: archive, kpi, sort, dead_letters.

Each runs as `roq pipeline run NAME …`, as `python -m roq.spark.pipeline.NAME …` and as `spark-submit …/NAME.py …`, prints what
it did as one line of JSON on standard output, and tells people about it on standard error.
"""
