"""Entry of ``python -m bench.growth``."""

from bench.growth.benchmark import main

if __name__ == "__main__":
    main()
