"""``python -m trimq.broker`` is ``mqbroker``."""

from trimq.broker.cli import main

if __name__ == "__main__":
    main()
