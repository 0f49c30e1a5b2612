"""`python -m minillm`: the same as the `minillm` command."""

from minillm.cli import main

main()
