"""The page of `sigmascope lbm serve`: a picture in, base and LoRA result side by side, with what each took.

The model runs in one worker thread (`jobs`), results are kept in memory (`recent`), and nothing is written to
disk. Only the command line and the tests import this package: it needs the extra `ui`.
"""
