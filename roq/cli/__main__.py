"""`python -m roq.cli`, the same as the console script `roq`."""

from roq.cli.main import main

main()
