"""Entry of ``python -m bench.ledger``."""

from bench.ledger.benchmark import main

if __name__ == "__main__":
    main()
