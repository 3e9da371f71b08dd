"""The `roq` command: one file per command group. Everything it shows comes from roq/client; nothing is decided here."""
