"""Entry of ``python -m bench.sampling``."""

from bench.sampling.benchmark import main

if __name__ == "__main__":
    main()
