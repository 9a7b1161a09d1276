"""Entry of ``python -m bench.fairness``."""

from bench.fairness.benchmark import main

if __name__ == "__main__":
    main()
