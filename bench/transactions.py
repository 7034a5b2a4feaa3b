"""Transactions of this broker and of Apache's: rows of bench.side_by_side, in a run of their own.

python -m bench.transactions [--rounds N] [--seconds N] [--json FILE] and the other options of bench.side_by_side. The
rounds are more than there, because Apache's figure of these rows varies most.
"""

from bench import side_by_side

ROWS = [name for name, row in side_by_side.ROWS.items() if row.stores == "transactions"]

if __name__ == "__main__":
    side_by_side.main(ROWS, rounds=5)
