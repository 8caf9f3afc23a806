"""`python -m regard`: the command line, for torchrun and for machines without scripts on their path."""

from regard.commands import main

if __name__ == "__main__":
    main()
