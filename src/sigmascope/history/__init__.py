"""Runs kept in SQL: SQLite by default, PostgreSQL where a machine is not alone.

What other rooms use: `keeper.keep` hands a run over, `store.open_store` opens the store, `references` finds the runs that a
command's words mean, `exchange` writes runs to a file and takes them in, and `comparable` finds the run to compare with.
"""
