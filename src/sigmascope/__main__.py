"""`python -m sigmascope` is the same as `sigmascope`."""

from sigmascope.cli import main

if __name__ == "__main__":
    main()
