"""`python -m verikda` is the `verikda` command."""

from verikda.cli import main

main(prog_name="verikda")
