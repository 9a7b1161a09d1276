"""Entry of ``python -m bench.hostile``."""

from bench.hostile.benchmark import main

if __name__ == "__main__":
    main()
