"""``python -m penstock.serve DIR ...``, which is ``penstock serve DIR ...``: OpenAI's API over ``penstock.LLM``."""

import sys

from ._serve.program import main

if __name__ == "__main__":
    sys.exit(main())
