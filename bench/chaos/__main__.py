"""Entry of ``python -m bench.chaos``."""

from bench.chaos.benchmark import main

if __name__ == "__main__":
    main()
