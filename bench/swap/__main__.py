"""Entry of ``python -m bench.swap``."""

from bench.swap.benchmark import main

if __name__ == "__main__":
    main()
