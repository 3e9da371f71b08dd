"""`roq console`: the cluster in a browser, and over HTTP for programs without an SDK (extra `console`)."""
