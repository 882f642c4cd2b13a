"""What no single test finds: faults, kills, damaged files, bombs, full disks, long lives and many threads, by the hundred.

`python -m tests.chaos --help` says how it is run; `docs/reliability.md` says what it holds Sigmascope to.
"""
